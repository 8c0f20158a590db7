"""Start vllm serve: on the head, or with executor mp one rank on every host; then what watches."""

from pyinfra import host

from cluster import commands, node
from cluster.operations import services

cluster = host.data.cluster

if commands.SERVE in node.containers(cluster, host.name):
    services.running(
        name="Start vllm serve",
        cluster=cluster,
        unit=commands.SERVE,
        ready="serve" if host.name == cluster.head else "headless",
        deadline=cluster.deadlines.serve,
    )

timers = node.timers(cluster, host.name)
if timers:
    services.watched(name="Start the watchdog", timers=timers)
