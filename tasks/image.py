"""Bring the image to every host; stop unless all have the same one, with what the executor needs.

A tag that has moved: pyinfra inventory.py tasks/image.py --data pull=always
"""

from pyinfra import host

from cluster.operations import image
from cluster.shell import reporter

cluster = host.data.cluster

image.planned(
    name="See who needs the image",
    cluster=cluster,
    always=host.data.get("pull") == "always",
)

if host.name == cluster.head:
    image.prepared(name="Have the image ready on the head", cluster=cluster)

# Every host runs these: the head gives while the others take.
image.pulled(name="Pull the image", cluster=cluster)
image.relayed(name="Relay the image over the fabric", cluster=cluster)
image.usable(name="See what is in the image", cluster=cluster)

if host.name == reporter(cluster):
    image.same_image(name="Compare the image of all hosts", cluster=cluster)
