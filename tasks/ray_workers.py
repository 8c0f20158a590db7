"""Start Ray on the workers; then Ray has to list every node under its fabric address."""

from pyinfra import host

from cluster import commands
from cluster.operations import services
from cluster.shell import reporter

cluster = host.data.cluster

if cluster.executor == "ray":
    if host.name != cluster.head:
        services.running(
            name="Start the Ray workers",
            cluster=cluster,
            unit=commands.RAY,
            ready="ray",
            deadline=cluster.deadlines.ray,
        )

    if host.name == reporter(cluster):
        services.nodes_listed(
            name="Wait until Ray lists every node",
            cluster=cluster,
            unless_serving=bool(host.data.get("unless_serving")),
        )
