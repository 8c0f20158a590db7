"""Start vllm serve: on the head, or with executor mp one rank on every host; then its watchdog."""

from pyinfra import host

from cluster import commands, node, operations

cluster = host.data.cluster

if commands.SERVE in node.containers(cluster, host.name):
    operations.running(
        name="Start vllm serve",
        cluster=cluster,
        unit=commands.SERVE,
        ready="serve" if host.name == cluster.head else "headless",
        deadline=cluster.deadlines.serve,
    )

if node.is_watched(cluster, host.name):
    operations.watched(name="Start the watchdog")
