"""Show what every host should run and what it runs, and ask for a completion.

Exit code 0 means that a token came back: pyinfra -y inventory.py tasks/status.py
All of it as JSON on stdout: --data json=true
"""

from pyinfra import host

from cluster.operations import status
from cluster.shell import reporter

cluster = host.data.cluster

status.seen(name="Read the state of every host", report=True)

if host.name == reporter(cluster):
    status.status_shown(name="Show the state", cluster=cluster, as_json=bool(host.data.get("json")))
