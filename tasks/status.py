"""Show what every host should run and what it runs, then ask for a completion.

Exit code 0 means that a token came back: pyinfra -y inventory.py tasks/status.py
"""

from pyinfra import host

from cluster import operations

cluster = host.data.cluster

operations.seen(name="Read the state of every host")

if host.name == operations.reporter(cluster):
    operations.status_shown(name="Show the state", cluster=cluster)

if host.name == cluster.head:
    operations.answers(name="Ask for a completion", cluster=cluster, with_metrics=True)
