"""Everything that stands on one host: its files, its units, and the hash of what should run.

A container carries the hash of all that defines it as a label. A different label means: restart
what depends on it. The same label means: leave it alone, even after an interrupted run.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

from cluster import commands
from cluster.environment import env_file, node_environment, secret_environment
from cluster.programs import source
from cluster.settings import Cluster
from cluster.units import UNIT_DIRECTORY, ranks_units, ray_unit, serve_unit, watchdog_units

IMAGE_HEADER = "image "
PROGRAMS = ("back_off", "reach", "ray_nodes", "gather", "completion", "watchdog", "drain")
"""The programs of remote/ that units run, as files on the hosts."""
WATCHDOG_TIMER = f"{commands.WATCHDOG}.timer"
RANKS_TIMER = f"{commands.RANKS}.timer"
TIMERS = (WATCHDOG_TIMER, RANKS_TIMER)
"""Those among UNITS that start the others, again and again."""
UNITS = (commands.RAY, commands.SERVE, commands.WATCHDOG, commands.RANKS, *TIMERS)
"""Every unit that a deployment may have written on a host, whatever its role."""


@dataclass(frozen=True)
class Versions:
    """What importlib.metadata says inside the image; None: not installed."""

    python: str
    vllm: str | None
    ray: str | None
    torch: str | None

    @property
    def drains(self) -> bool:
        """Whether vllm serve has --shutdown-timeout: since 0.18.0 (vllm-project/vllm#36666)."""
        numbers = re.match(r"(\d+)\.(\d+)", self.vllm or "")
        return numbers is not None and (int(numbers[1]), int(numbers[2])) >= (0, 18)

    def __str__(self) -> str:
        pairs = (("vllm", self.vllm), ("ray", self.ray), ("torch", self.torch))
        named = [f"{label} {version}" for label, version in pairs if version]
        return ", ".join([*named, f"Python {self.python}"])


@dataclass(frozen=True)
class Image:
    """An image as it is on the hosts. `id` is Docker's image id."""

    id: str
    versions: Versions


@dataclass(frozen=True)
class File:
    """A file on a host. The content of a secret one is never read back, shown or logged."""

    path: str
    content: str
    mode: int = 0o644
    is_secret: bool = False

    @property
    def sha256(self) -> str:
        """Hex digest of the content."""
        return hashlib.sha256(self.content.encode()).hexdigest()


@dataclass(frozen=True)
class Node:
    """One host as it should be."""

    name: str
    files: tuple[File, ...]
    definitions: dict[str, str]
    """The wanted definition hash of each container on this host, by container name."""


def unit_path(unit: str) -> str:
    """Path of a unit file of ours; a name without a suffix is a service's."""
    return f"{UNIT_DIRECTORY}/{unit if '.' in unit else f'{unit}.service'}"


def containers(cluster: Cluster, name: str) -> list[str]:
    """The containers (and units of the same names) of node `name`, in the order they start."""
    if cluster.executor == "mp":
        return [commands.SERVE]
    return [commands.RAY, commands.SERVE] if name == cluster.head else [commands.RAY]


def timers(cluster: Cluster, name: str) -> list[str]:
    """The timers of node `name`.

    The watchdog is the head's. The watch over the ranks is every host's: without Ray it alone
    makes a group of several start anew as a group, so that no setting turns it off.
    """
    found = []
    if cluster.watchdog.enabled and name == cluster.head:
        found.append(WATCHDOG_TIMER)
    if cluster.executor == "mp" and cluster.workers:
        found.append(RANKS_TIMER)
    return found


def paths(cluster: Cluster) -> list[str]:
    """Every path that a deployment may have written on a host, whatever its role."""
    return [
        commands.node_env_path(cluster),
        commands.carry_over_path(cluster),
        *(commands.program_path(cluster, program) for program in PROGRAMS),
        *(unit_path(unit) for unit in UNITS),
    ]


def render(cluster: Cluster, name: str, image: Image) -> Node:
    """Render the files of node `name`, and the hashes of its containers."""
    header = [
        f"Environment of {name}, {cluster.hosts[name].role} of cluster {cluster.name}.",
        "Written by multinode-vllm; change cluster.yaml and deploy instead of this file.",
        f"{IMAGE_HEADER}{image.id} {json.dumps(image.versions.__dict__, sort_keys=True)}",
    ]
    variables = node_environment(cluster, name)
    rendered = [
        File(commands.node_env_path(cluster), env_file(variables, header), 0o600),
    ]
    if cluster.container_secrets:
        content = env_file(secret_environment(cluster), ["Secrets; written by multinode-vllm."])
        rendered.append(File(commands.secrets_path(cluster), content, 0o600, is_secret=True))
    rendered.append(_program(cluster, "back_off"))
    definitions: dict[str, str] = {}
    if cluster.executor == "ray":
        definitions[commands.RAY] = ray_definition(cluster, name, image)
        run = _labelled(commands.ray_container(cluster, name, image.id), definitions[commands.RAY])
        rendered.append(File(unit_path(commands.RAY), ray_unit(cluster, name, run)))
        if name != cluster.head:
            rendered.append(_program(cluster, "reach"))
    if commands.SERVE in containers(cluster, name):
        if cluster.executor == "ray":
            rendered += [
                File(commands.carry_over_path(cluster), _carry_over(cluster)),
                _program(cluster, "ray_nodes"),
            ]
        definitions[commands.SERVE] = serve_definition(cluster, name, image)
        run = _labelled(_serve_container(cluster, name, image), definitions[commands.SERVE])
        drains = image.versions.drains
        rendered.append(File(unit_path(commands.SERVE), serve_unit(cluster, name, run, drains)))
        if name == cluster.head and cluster.deadlines.drain:
            rendered.append(_program(cluster, "drain"))
        if cluster.executor == "mp" and cluster.workers:
            rendered.append(_program(cluster, "gather"))
    units: dict[str, str] = {}
    if WATCHDOG_TIMER in timers(cluster, name):
        rendered += [_program(cluster, "completion"), _program(cluster, "watchdog")]
        units |= watchdog_units(cluster)
    if RANKS_TIMER in timers(cluster, name):
        units |= ranks_units(cluster, name)
    rendered += [File(unit_path(unit), text) for unit, text in units.items()]
    return Node(name, tuple(rendered), definitions)


def _program(cluster: Cluster, program: str) -> File:
    return File(commands.program_path(cluster, program), source(program))


def ray_definition(cluster: Cluster, name: str, image: Image) -> str:
    """The hash of all that defines Ray on node `name`; a worker depends on the head."""
    parts = [_own(cluster, name, commands.ray_container(cluster, name, image.id))]
    if name != cluster.head:
        parts.append(ray_definition(cluster, cluster.head, image))
    return _digest(parts)


def serve_definition(cluster: Cluster, name: str, image: Image) -> str:
    """The hash of all that defines vllm serve on node `name`: the whole group belongs to it."""
    if cluster.executor == "ray":
        parts = [_own(cluster, name, _serve_container(cluster, name, image))]
        parts += [ray_definition(cluster, node, image) for node in cluster.nodes]
    else:
        # Every rank builds its own configuration, and a rank cannot rejoin a running group.
        parts = [
            _own(cluster, node, _serve_container(cluster, node, image))
            for node in [name, *cluster.nodes]
        ]
    return _digest(parts)


def _serve_container(cluster: Cluster, name: str, image: Image) -> list[str]:
    return commands.serve_container(cluster, name, image.id, image.versions.drains)


def parse_image_header(env_text: str) -> Image | None:
    """Read back which image an env file was rendered for, and the versions found in it then."""
    for line in env_text.splitlines():
        marker = f"# {IMAGE_HEADER}"
        if line.startswith(marker):
            image_id, _, versions = line[len(marker) :].partition(" ")
            try:
                return Image(image_id, Versions(**json.loads(versions)))
            except (ValueError, TypeError):
                return None
    return None


def _own(cluster: Cluster, name: str, run: list[str]) -> str:
    variables = [*node_environment(cluster, name), *secret_environment(cluster)]
    # Another order of the same variables is the same environment.
    return _digest([*run, *sorted(f"{variable.name}={variable.value}" for variable in variables)])


def _digest(parts: list[str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _labelled(run: list[str], definition: str) -> list[str]:
    index = run.index(next(part for part in run if part.startswith("--name=")))
    label = f"--label={commands.DEFINITION_LABEL}={definition}"
    return [*run[: index + 1], label, *run[index + 1 :]]


def _carry_over(cluster: Cluster) -> str:
    """Names that vLLM must not copy from the head to the workers.

    Every node has its own complete env file. vLLM's first Ray executor (default up to 0.20) would
    overwrite the workers' NCCL_* and VLLM_* with the head's.
    """
    names = {
        variable.name for name in cluster.hosts for variable in node_environment(cluster, name)
    }
    return json.dumps(sorted(names | set(cluster.container_secrets)), indent=2) + "\n"
