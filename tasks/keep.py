"""Keep the files of this deployment as known to be good, for tasks/rollback.py.

It belongs behind a completion, as in deploy.py.
"""

from pyinfra import host

from cluster import rolling_back

rolling_back.kept(name="Keep this deployment as known to be good", cluster=host.data.cluster)
