"""Print the last lines of every host's units.

More of them: pyinfra -y inventory.py tasks/logs.py --data lines=200
"""

from pyinfra import host

from cluster import node
from cluster.operations import services

services.logged(
    name="Print the logs",
    units=node.containers(host.data.cluster, host.name),
    lines=int(host.data.get("lines", 40)),
)
