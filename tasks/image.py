"""Bring the image to every host; stop unless all have the same one, with what the executor needs.

A tag that has moved: pyinfra inventory.py tasks/image.py --data pull=always
"""

from pyinfra import host

from cluster import operations, pulling

cluster = host.data.cluster

pulling.planned(
    name="See who needs the image",
    cluster=cluster,
    always=host.data.get("pull") == "always",
)

if host.name == cluster.head:
    pulling.prepared(name="Have the image ready on the head", cluster=cluster)

# Every host runs these: the head gives while the others take.
pulling.pulled(name="Pull the image", cluster=cluster)
pulling.relayed(name="Relay the image over the fabric", cluster=cluster)
pulling.usable(name="See what is in the image", cluster=cluster)

if host.name == operations.reporter(cluster):
    pulling.same_image(name="Compare the image of all hosts", cluster=cluster)
