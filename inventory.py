"""The hosts, made from group_data/cluster.yaml, or from the file named by CLUSTER."""

from pyinfra.api.exceptions import InventoryError

from cluster.inventory import groups
from cluster.load import ClusterFileError, load

try:
    _cluster = load()
except ClusterFileError as error:
    raise InventoryError(f"this cluster file cannot be used:\n{error}") from None

head, workers = groups(_cluster)
