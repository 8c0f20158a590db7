"""Start Ray on the workers; then Ray has to list every node under its fabric address."""

from pyinfra import host

from cluster import commands, operations

cluster = host.data.cluster

if cluster.executor == "ray":
    if host.name != cluster.head:
        operations.running(
            name="Start the Ray workers",
            cluster=cluster,
            unit=commands.RAY,
            ready="ray",
            deadline=cluster.deadlines.ray,
        )

    if host.name == operations.reporter(cluster):
        operations.nodes_listed(
            name="Wait until Ray lists every node",
            cluster=cluster,
            unless_serving=bool(host.data.get("unless_serving")),
        )
