"""Find the fabric between hosts, and print the hosts section of cluster.yaml with reasons.

Hosts that ssh reaches; the first is the head: pyinfra -y spark-1,spark-2 tasks/discover.py
Those of cluster.yaml: pyinfra -y inventory.py tasks/discover.py
Into a file: --data write=PATH, and --data overwrite=yes where it is there already.
"""

from pyinfra import host

from cluster.operations import discover

discover.looked(name="Look at interfaces, RDMA devices and GPUs")

discover.met(name="Try the networks between the hosts")

if host.name == discover.first_host():
    discover.proposed(
        name="Propose the fabric",
        write=host.data.get("write"),
        overwrite=host.data.get("overwrite") in {"yes", True},
    )
