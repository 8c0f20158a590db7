"""Take the cluster's lock on the head, so that two people's runs do not interleave.

It ends with the run, however that ends. Take it from somebody else, whose run then goes on without:
--data take_over=true
"""

from pyinfra import host

from cluster.operations import lock

cluster = host.data.cluster

if host.name == cluster.head:
    lock.locked(name="Take the cluster's lock", take_over=bool(host.data.get("take_over", False)))
