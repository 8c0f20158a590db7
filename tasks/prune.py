"""Show the images and models of this cluster that the hosts keep: sizes, last use, what is in use.

Nothing is deleted unless it is named: --data delete=NAME[,NAME], or --data delete=unused
"""

from pyinfra import host, local

from cluster import operations, pruning

cluster = host.data.cluster
confirmation = host.data.get("delete")

if confirmation:
    local.include("tasks/lock.py")

pruning.listed(name="Read what the hosts keep", cluster=cluster)

if host.name == operations.reporter(cluster):
    pruning.chosen(name="Show it", confirmation=confirmation)

if confirmation:
    pruning.deleted(name="Delete what was named", cluster=cluster, confirmation=confirmation)
