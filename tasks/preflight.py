"""Look at every host and the fabric between them before anything is started.

The findings as JSON on stdout: pyinfra -y inventory.py tasks/preflight.py --data json=true
"""

from pyinfra import host

from cluster.operations import preflight, status
from cluster.shell import reporter

cluster = host.data.cluster

unless_serving = bool(host.data.get("unless_serving"))

if unless_serving and host.name == cluster.head:
    status.seen(name="Read what the head runs")

preflight.probed(
    name="Probe the host and the fabric", cluster=cluster, unless_serving=unless_serving
)

if host.name == reporter(cluster):
    preflight.judged(
        name="Judge what was found", cluster=cluster, as_json=bool(host.data.get("json"))
    )
