"""Keep the files of this deployment as known to be good, for tasks/rollback.py.

It belongs behind a completion, as in deploy.py.
"""

from pyinfra import host

from cluster.operations import rollback

rollback.kept(name="Keep this deployment as known to be good", cluster=host.data.cluster)
