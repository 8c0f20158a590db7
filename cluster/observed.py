"""What this run knows of each host: read once, and again after we changed something.

pyinfra asks a host anew at every get_fact. Most operations ask for the same thing, and on a rerun
nothing changes in between, so one answer serves them all.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from pydantic import ValidationError
from pyinfra import state
from pyinfra.api import Host

from cluster import commands, node
from cluster.facts import HostProbe, ImageVersions, NodeState
from cluster.findings import Situation, listening_ports, meeting_ports
from cluster.host_state import HostState
from cluster.image import names
from cluster.memory import remembered
from cluster.node import Image, Node, Versions
from cluster.probe import Probe
from cluster.programs import source
from cluster.settings import Cluster
from cluster.tables import log_patterns

MEETING_SECONDS = 6
"""How long hosts try to reach each other. ssh reaches them within a fraction of a second."""
NOT_PULLED = Image("(image not pulled yet)", Versions("?", None, None, None))


class UnreadableError(Exception):
    """A host does not say what this run has to know of it. The message is for a person."""


@dataclass(frozen=True)
class Restored:
    """A deployment that a host has gone back to; it counts instead of cluster.yaml."""

    name: str
    since: str
    cluster: Cluster
    image: str
    """Docker's id."""
    definitions: dict[str, str]


@dataclass
class _Memory:
    """What one run knows of one host."""

    state: HostState | None = None
    seen_executing: bool = False
    image: Image | None = None
    wanted: tuple[Image, Node] | None = None
    ray_restarted: bool = False
    to_restart: set[str] = field(default_factory=set)
    restored: Restored | None = None
    probe: Probe | None = None
    probe_error: str | None = None


_memory = partial(remembered, _Memory)


def look(host: Host, report: bool = False) -> HostState:
    """Return the state of a host, from memory where nothing can have changed since.

    report: with what only a report shows. Raises UnreadableError.
    """
    memory = _memory(host)
    known = memory.state
    # Between the plan and its execution a person may have thought for an hour.
    is_current = known is not None and memory.seen_executing == state.is_executing
    if known is not None and is_current and not (report and known.report is None):
        return known
    cluster: Cluster = memory.restored.cluster if memory.restored else host.data.cluster
    wanted = {
        "images": [memory.restored.image] if memory.restored else names(cluster.image.name),
        "known_good": commands.known_good_path(cluster),
        "containers": [commands.RAY, commands.SERVE],
        "units": list(node.UNITS),
        "files": node.paths(cluster),
        "secret_files": [commands.secrets_path(cluster)],
        "label": commands.DEFINITION_LABEL,
        "watchdog": commands.WATCHDOG_STATE,
        "port": cluster.serve.port if host.name == cluster.head else None,
        "report": _report(cluster, host.name) if report else None,
    }
    found: HostState | None = host.get_fact(
        NodeState, wanted=wanted, _stdin=source("node_state"), _ignore_errors=True
    )
    memory.state, memory.seen_executing = found, state.is_executing
    if found is None:
        raise UnreadableError(f"{host.name} did not say what is on it; see the lines above")
    return found


def _report(cluster: Cluster, name: str) -> dict[str, Any]:
    asks_ray = cluster.executor == "ray" and name == cluster.head
    return {**log_patterns(), "ray": commands.ray_nodes_now(cluster) if asks_ray else None}


def probe(host: Host) -> None:
    """Probe a host for preflight; all hosts have to do this at the same time.

    A host that cannot be probed is remembered with the reason; its operation does not fail.
    """
    cluster: Cluster = host.data.cluster
    memory = _memory(host)
    address = cluster.hosts[host.name].fabric.address
    active = [each.name for each in state.inventory.get_active_hosts()]
    peers = {name: str(cluster.address(name)) for name in active if name != host.name}
    wanted = {
        "root": "/",
        "model": cluster.model.name if cluster.model_is_directory else None,
        "containers": [commands.RAY, commands.SERVE],
        "label": commands.CLUSTER_LABEL,
        "ports": list(listening_ports(cluster)),
        "interface": cluster.hosts[host.name].fabric.interface,
        "meet": {
            "address": str(address.ip),
            "peers": peers,
            "ports": meeting_ports(cluster, _random_ports()),
            "udp": _random_ports()[0],
            "deadline": MEETING_SECONDS,
        },
    }
    arguments: dict[str, Any] = {"_stdin": source("probe"), "_ignore_errors": True, "_timeout": 60}
    if sudo_would_ask_nobody(host):
        arguments |= {"as_root": True, "_sudo": False}
    found = host.get_fact(HostProbe, wanted=wanted, **arguments)
    memory.probe, memory.probe_error = None, None
    if not found or "garbage" in found:
        memory.probe_error = (found or {}).get("garbage", "the probe did not run, see above")
        return
    try:
        memory.probe = Probe.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        memory.probe_error = f"the probe's answer is not usable: {place}: {first['msg']}"


def sudo_would_ask_nobody(host: Host) -> bool:
    """Whether pyinfra would ask for a sudo password although no person and no password is there."""
    has_password = host.data.get("_sudo_password") or state.config.SUDO_PASSWORD
    return bool(host.data.get("_sudo")) and not has_password and not sys.stdin.isatty()


def situation(cluster: Cluster) -> Situation:
    """What the probes of this run have found."""
    probes: dict[str, Probe] = {}
    failed: dict[str, str] = {}
    for host in state.inventory.get_active_hosts():
        memory = _memory(host)
        if memory.probe is not None:
            probes[host.name] = memory.probe
        elif memory.probe_error is not None:
            failed[host.name] = memory.probe_error
    return Situation(cluster, probes, failed)


@cache
def _random_ports() -> list[int]:
    """Two ports as the kernel gives them to Ray, gloo and NCCL; the same on all hosts of a run."""
    return random.sample(range(32768, 60999), 2)


def forget(host: Host) -> None:
    """Have the next look() ask the host again."""
    _memory(host).state = None


def image(host: Host) -> Image | None:
    """Return the image on a host with its versions, or None where it is not there.

    Raises UnreadableError.

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
            versions = host.get_fact(
                ImageVersions, image=found.id, _stdin=None, _ignore_errors=True
            )
            if versions is None:
                raise UnreadableError(
                    f"{host.name}: {cluster.image.name} ({found.id}) does not run Python; is it a "
                    "vLLM image, for this machine's architecture? See the lines above"
                )
            known = Image(found.id, versions)
        memory.image = known
    return memory.image


def wanted(host: Host) -> Node:
    """Return the host as it should be, rendered for the image that it has."""
    memory = _memory(host)
    if memory.restored is not None:
        return Node(host.name, (), memory.restored.definitions)
    found = image(host) or NOT_PULLED
    if memory.wanted is None or memory.wanted[0] != found:
        memory.wanted = (found, node.render(host.data.cluster, host.name, found))
    return memory.wanted[1]


def serves(cluster: Cluster, ready: bool = True) -> bool:
    """Whether vllm serve already runs as wanted, so that a completion will prove every layer.

    ready: it has to listen already; else it may still be loading.

    Answers from what this run has read of the head; False where it has read nothing yet, or has
    restarted Ray somewhere.
    """
    head = next(
        (host for host in state.inventory.get_active_hosts() if host.name == cluster.head), None
    )
    memory = _memory(head) if head else None
    if head is None or memory is None or memory.state is None or ray_restarted():
        return False
    return (memory.state.listening or not ready) and runs(head, commands.SERVE)


def runs(host: Host, unit: str) -> bool:
    """Whether a unit is active and enabled, and its container carries the wanted definition."""
    found = look(host)
    container = found.containers.get(unit)
    return (
        unit not in _memory(host).to_restart
        and container is not None
        and container.definition == wanted(host).definitions.get(unit)
        and container.status == "running"
        and found.unit(unit, "ActiveState") == "active"
        and found.unit(unit, "UnitFileState") == "enabled"
    )


def restore(host: Host, target: Restored) -> None:
    """Have this run measure a host against an earlier deployment from here on."""
    memory = _memory(host)
    memory.restored, memory.state, memory.image = target, None, None


def restored(host: Host) -> Restored | None:
    """The earlier deployment that this run has gone back to on a host, if it has."""
    return _memory(host).restored


def full_unit(unit: str) -> str:
    """A unit's name with its suffix; one without is a service."""
    return unit if "." in unit else f"{unit}.service"


def restart(host: Host, units: list[str]) -> None:
    """Have this run start units of a host anew, although they run as wanted."""
    _memory(host).to_restart.update(units)


def started(host: Host, unit: str) -> None:
    """Remember that a unit has been started in this run."""
    _memory(host).to_restart.discard(unit)


def note_ray_restart(host: Host) -> None:
    """Remember that this run has started Ray on a host: what stood on it is gone."""
    _memory(host).ray_restarted = True


def ray_restarted() -> bool:
    """Whether this run has started Ray on any host."""
    return any(_memory(host).ray_restarted for host in state.inventory.get_active_hosts())


def digests() -> dict[str, str]:
    """What tells the images of this run's hosts apart, by host name.

    Docker's own ids where they are all the same; else a hash of the content, which holds across
    Docker's two image stores.
    """
    images = {
        host.name: memory.state.image
        for host in state.inventory.get_active_hosts()
        if (memory := _memory(host)).state is not None and memory.state.image is not None
    }
    if len({image.id for image in images.values()}) == 1:
        return {name: image.id for name, image in images.items()}
    return {name: image.content or image.id for name, image in images.items()}
