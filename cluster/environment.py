"""The environment of a node's containers, derived from cluster.yaml by one pure function.

Every layer that picks an address by itself (Ray, torch, vLLM's queues, NCCL) is told here which
one to take. Docker reads the result with --env-file: raw NAME=VALUE lines, no quotes.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.settings import Cluster, read_secret
from cluster.tables import table

CONTAINER_CACHE = "/root/.cache"
"""Where the containers keep their caches; paths.cache of the host is mounted there."""


@dataclass(frozen=True)
class Variable:
    """One line of an env file."""

    name: str
    value: str
    comment: str


def node_environment(cluster: Cluster, name: str) -> list[Variable]:
    """Return the variables of node `name`, secrets aside: derived ones, then the user's.

    A host's env beats the cluster's env, which beats the derived value; null removes a variable.
    """
    derived = _derived(cluster, name)
    variables = {key: Variable(key, value, _read_by(key)) for key, value in derived.items()}
    for values, place in ((cluster.env, "env"), (cluster.hosts[name].env, f"hosts.{name}.env")):
        for key, value in values.items():
            variables.pop(key, None)
            if value is not None:
                comment = f"from cluster.yaml, {place}"
                if key in derived and derived[key] != value:
                    comment += f"; derived would be {derived[key]}"
                variables[key] = Variable(key, value, comment)
    return list(variables.values())


def secret_environment(cluster: Cluster) -> list[Variable]:
    """Return the variables whose values are secret, for a file of their own.

    Raises ValueError where a secret cannot be read; settings.problems has already checked that.
    """
    return [
        Variable(key, read_secret(source).get_secret_value(), _read_by(key))
        for key, source in cluster.container_secrets.items()
    ]


def env_file(variables: list[Variable], header: list[str]) -> str:
    """Render an env file for docker run --env-file, a comment above each variable."""
    lines = [f"# {line}" for line in header]
    for variable in variables:
        lines += ["", f"# {variable.comment}", f"{variable.name}={variable.value}"]
    return "\n".join(lines) + "\n"


def _derived(cluster: Cluster, name: str) -> dict[str, str]:
    fabric = cluster.hosts[name].fabric
    values = {
        "VLLM_HOST_IP": str(fabric.address.ip),
        "GLOO_SOCKET_IFNAME": fabric.interface,
        "NCCL_SOCKET_IFNAME": fabric.interface,
    }
    if fabric.hcas:
        values |= {"NCCL_IB_HCA": ",".join(fabric.hcas), "NCCL_IB_DISABLE": "0"}
    elif fabric.hcas is not None:
        values |= {"NCCL_IB_DISABLE": "1"}
    if cluster.executor == "ray":
        values |= {
            "RAY_ADDRESS": cluster.gcs_address,
            "RAY_AUTH_MODE": "token" if "RAY_AUTH_TOKEN" in cluster.secrets else "disabled",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
    values["VLLM_NO_USAGE_STATS"] = "1"
    if cluster.is_offline:
        values |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return values | {
        "TRITON_CACHE_DIR": f"{CONTAINER_CACHE}/triton",
        "MASTER_ADDR": str(cluster.head_address),
        "TP_SOCKET_IFNAME": fabric.interface,
    }


def _read_by(name: str) -> str:
    row = table("variables").get(name)
    return str(row["read_by"]) if row else "from cluster.yaml"
