"""Stop vllm serve, the Ray workers, the Ray head; remove our units and files.

Models and caches stay on the hosts. A deploy afterwards starts from nothing.
"""

from pyinfra import host

from cluster import commands, operations

cluster = host.data.cluster

if host.name == cluster.head or cluster.executor == "mp":
    operations.stopped(name="Stop vllm serve", unit=commands.SERVE)

if host.name != cluster.head:
    operations.stopped(name="Stop the Ray workers", unit=commands.RAY)

if host.name == cluster.head:
    operations.stopped(name="Stop the Ray head", unit=commands.RAY)

operations.removed(name="Remove our units and files", cluster=cluster)
