"""What this run knows of each host: read once, and again after we changed something.

pyinfra asks a host anew at every get_fact. Most operations ask for the same thing, and on a rerun
nothing changes in between, so one answer serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyinfra import state
from pyinfra.api import Host
from pyinfra.api.exceptions import OperationError

from cluster import commands, node
from cluster.facts import HostState, ImageVersions, NodeState, source
from cluster.node import Image, Node, Versions
from cluster.settings import Cluster

NOT_PULLED = Image("(image not pulled yet)", Versions("?", None, None, None))


@dataclass
class _Memory:
    """What one run knows of one host."""

    state: HostState | None = None
    seen_executing: bool = False
    image: Image | None = None


def _memory(host: Host) -> _Memory:
    # `host` is often pyinfra's proxy of the current host, whose hash changes with it; the real
    # host's own dictionary is what stays.
    memory: _Memory = host.connector_data.setdefault(__name__, _Memory())
    return memory


def look(host: Host) -> HostState:
    """Return the state of a host, from memory where nothing can have changed since."""
    memory = _memory(host)
    # Between the plan and its execution a person may have thought for an hour.
    if memory.state is None or memory.seen_executing != state.is_executing:
        cluster: Cluster = host.data.cluster
        wanted = {
            "image": cluster.image,
            "containers": [commands.RAY, commands.SERVE],
            "units": [commands.RAY, commands.SERVE],
            "files": node.paths(cluster),
            "secret_files": [commands.secrets_path(cluster)],
            "label": commands.DEFINITION_LABEL,
            "port": cluster.serve.port if host.name == cluster.head else None,
        }
        memory.state = host.get_fact(NodeState, wanted=wanted, _stdin=source("node_state"))
        memory.seen_executing = state.is_executing
        if memory.state is None:
            raise OperationError(f"{host.name} did not say what is on it; see its error above")
    return memory.state


def forget(host: Host) -> None:
    """Have the next look() ask the host again."""
    _memory(host).state = None


def image(host: Host) -> Image | None:
    """Return the image on a host with its versions, or None where it is not there.

    The versions are read once per image: the env file on the host remembers them.
    """
    found, memory = look(host).image, _memory(host)
    if found is None:
        return None
    if memory.image is None or memory.image.id != found.id:
        cluster: Cluster = host.data.cluster
        env_text = look(host).files.get(commands.node_env_path(cluster)) or ""
        known = node.parse_image_header(env_text)
        if known is None or known.id != found.id:
            versions = host.get_fact(ImageVersions, image=found.id, _stdin=None)
            if versions is None:
                return None
            known = Image(found.id, versions)
        memory.image = known
    return memory.image


def wanted(host: Host) -> Node:
    """Return the host as it should be, rendered for the image that it has."""
    return node.render(host.data.cluster, host.name, image(host) or NOT_PULLED)


def digests() -> dict[str, str]:
    """The image digest of every host seen in this run, by host name."""
    found: dict[str, str] = {}
    for host in state.inventory.get_active_hosts():
        seen = _memory(host).state
        if seen is not None and seen.image is not None:
            found[host.name] = seen.image.digest(host.data.cluster.image)
    return found
