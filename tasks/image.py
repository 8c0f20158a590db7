"""Pull the image on every host; stop unless all have the same one, with what the executor needs.

A tag that has moved: pyinfra inventory.py tasks/image.py --data pull=always
"""

from pyinfra import host

from cluster import operations

cluster = host.data.cluster

operations.pulled(
    name="Pull the image",
    cluster=cluster,
    always=host.data.get("pull") == "always",
)

if host.name == operations.reporter(cluster):
    operations.same_image(name="Compare the image of all hosts", cluster=cluster)
