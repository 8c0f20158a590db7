"""Ask for a completion on the head, and report."""

from pyinfra import host

from cluster import operations

cluster = host.data.cluster

if host.name == cluster.head:
    operations.answers(name="Ask for a completion", cluster=cluster)
