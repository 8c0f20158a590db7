"""Start Ray on the head; then every host has to reach it over the fabric."""

from pyinfra import host

from cluster import commands
from cluster.operations import services

cluster = host.data.cluster

if cluster.executor == "ray":
    if host.name == cluster.head:
        services.paused(name="Stop vllm serve if its group changes")
        services.running(
            name="Start the Ray head",
            cluster=cluster,
            unit=commands.RAY,
            ready="ray",
            deadline=cluster.deadlines.ray,
        )

    # Every host runs this: it is the barrier before the workers, and a test of the fabric.
    services.head_reached(
        name="Reach the Ray head over the fabric",
        cluster=cluster,
        unless_serving=bool(host.data.get("unless_serving")),
    )
