"""Stop vllm serve, the Ray workers, the Ray head; remove our units and files.

Models and caches stay on the hosts. A deploy afterwards starts from nothing.
"""

from pyinfra import host, local

from cluster import commands, node
from cluster.operations import services, status

cluster = host.data.cluster

local.include("tasks/lock.py")

# Every host runs this: it is the barrier that keeps the order below.
status.seen(name="Read what runs")

if host.name == cluster.head:
    services.stopped(name="Stop vllm serve and its watchdog", units=[*node.TIMERS, commands.SERVE])
elif cluster.executor == "mp":
    services.stopped(
        name="Stop the other ranks of vllm serve", units=[*node.TIMERS, commands.SERVE]
    )

if host.name != cluster.head:
    services.stopped(name="Stop the Ray workers", units=[commands.RAY])

if host.name == cluster.head:
    services.stopped(name="Stop the Ray head", units=[commands.RAY])

services.removed(name="Remove our units and files", cluster=cluster)
