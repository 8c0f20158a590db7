"""Bring the model to the head, then from there to every other host over the fabric.

Each run compares sizes. Read and hash everything: --data verify=true
Ask the hub again what the revision means: --data update=true
"""

from pyinfra import host

from cluster.operations import model

cluster = host.data.cluster

verify = bool(host.data.get("verify"))

if host.name == cluster.head:
    model.downloaded(
        name="Have the model on the head",
        cluster=cluster,
        update=bool(host.data.get("update")),
        verify=verify,
    )

# Every host runs the others: the head goes first, then all compare themselves with it.
if cluster.model.relay:
    model.compared(name="Compare the model with the head's", cluster=cluster, verify=verify)
    model.relayed(name="Bring the model to the other hosts", cluster=cluster)
    model.complete(name="See that all of it is here", cluster=cluster)

model.cache_dropped(name="Make room in the memory", cluster=cluster)
