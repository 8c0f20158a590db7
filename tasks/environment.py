"""Write every host's env files and units."""

from pyinfra import host

from cluster.operations import services

services.rendered(name="Write env files and units", cluster=host.data.cluster)
