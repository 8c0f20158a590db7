"""Show the images and models of this cluster that the hosts keep: sizes, last use, what is in use.

Nothing is deleted unless it is named: --data delete=NAME[,NAME], or --data delete=unused
"""

from pyinfra import host, local

from cluster.operations import prune
from cluster.shell import reporter

cluster = host.data.cluster
confirmation = host.data.get("delete")

if confirmation:
    local.include("tasks/lock.py")

prune.listed(name="Read what the hosts keep", cluster=cluster)

if host.name == reporter(cluster):
    prune.chosen(name="Show it", confirmation=confirmation)

if confirmation:
    prune.deleted(name="Delete what was named", cluster=cluster, confirmation=confirmation)
