"""What every host should run and what it runs, for people and for machines. Pure.

The parts of a host are called layers here: Ray below, vllm serve on it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cluster import commands
from cluster.host_state import Answer, Failure, HostState
from cluster.node import Node
from cluster.settings import Cluster

HEADER = ("host", "layer", "unit", "container", "up for", "restarts", "current")


@dataclass(frozen=True)
class LayerStatus:
    """One container of ours and the unit around it, on one host."""

    host: str
    layer: str
    wanted: bool
    """cluster.yaml has it on this host."""
    unit: str
    """systemd's ActiveState, or "none"."""
    at_boot: bool
    """The unit is enabled."""
    container: str
    """Docker's state, or "none"."""
    uptime: int | None
    """Seconds since the unit became active."""
    restarts: int
    """By systemd, since the last deploy, restart or boot."""
    current: bool
    """The running container is what cluster.yaml describes."""
    last_failure: Failure | None

    @property
    def row(self) -> tuple[str, ...]:
        """A row below HEADER."""
        if not self.wanted:
            current = "no: it has no place here"
        elif self.container == "none":
            current = "-"
        else:
            current = "yes" if self.current else "no: a deploy would restart it"
        unit = self.unit if self.at_boot or self.unit == "none" else f"{self.unit}, not at boot"
        since = "-" if self.uptime is None else duration(self.uptime)
        return (self.host, self.layer, unit, self.container, since, str(self.restarts), current)


@dataclass(frozen=True)
class HostStatus:
    """One host."""

    host: str
    role: str
    address: str
    """On the fabric."""
    problem: str | None
    """Why Docker or systemd does not answer."""
    image: str | None
    """Docker's id of cluster.yaml's image."""
    gpus: list[str]
    stale_files: list[str]
    """Files that a deploy would write."""
    layers: list[LayerStatus]


@dataclass(frozen=True)
class Status:
    """The whole cluster."""

    cluster: str
    url: str
    model: str
    hosts: list[HostStatus]
    ray: list[str] | None
    """What Ray lacks; None where it was not asked."""
    watchdog: str
    answer: Answer | None

    @property
    def serves(self) -> bool:
        """Whether a token came back."""
        return self.answer is not None and not self.answer.error

    def to_json(self) -> dict[str, Any]:
        """All of it, for machines."""
        return {"serves": self.serves, **asdict(self)}


def host_status(cluster: Cluster, name: str, found: HostState, wanted: Node) -> HostStatus:
    """Compare one host with what cluster.yaml wants of it."""
    report = found.report
    stale = [
        file.path
        for file in wanted.files
        if (
            found.secret_files.get(file.path) != file.sha256
            if file.is_secret
            else found.files.get(file.path) != file.content
        )
    ]
    return HostStatus(
        host=name,
        role=cluster.hosts[name].role,
        address=str(cluster.address(name)),
        problem=found.docker_error or found.systemd_error,
        image=found.image.id if found.image else None,
        gpus=[_gpu(fields) for fields in report.gpus] if report else [],
        stale_files=stale,
        layers=[
            _layer(name, layer, found, wanted)
            for layer in (commands.RAY, commands.SERVE)
            if layer in wanted.definitions or layer in found.containers
        ],
    )


def _layer(name: str, layer: str, found: HostState, wanted: Node) -> LayerStatus:
    container = found.containers.get(layer)
    definition = wanted.definitions.get(layer)
    uptime = found.unit(layer, "Uptime")
    is_active = found.unit(layer, "ActiveState") == "active"
    return LayerStatus(
        host=name,
        layer=layer,
        wanted=definition is not None,
        unit=found.unit(layer, "ActiveState") if found.has_unit(layer) else "none",
        at_boot=found.unit(layer, "UnitFileState") == "enabled",
        container=container.status if container else "none",
        uptime=int(uptime) if uptime and is_active else None,
        restarts=int(found.unit(layer, "NRestarts") or 0),
        current=container is not None and container.definition == definition,
        last_failure=found.report.failures.get(layer) if found.report else None,
    )


def _gpu(fields: list[str]) -> str:
    """`fields`: index, name, memory used and total (MiB), utilization (%), as nvidia-smi says."""
    if len(fields) != 5:
        return ", ".join(fields)
    index, name, used, total, load = fields
    # On unified memory nvidia-smi says [N/A].
    memory = f"{used} of {total} MiB" if total.isdigit() else "unified memory"
    return f"{index}: {name}, {memory}, {load} % busy"


def lines(status: Status) -> list[str]:
    """What there is to say beside the table of layers, one thing per line."""
    said = []
    for host in status.hosts:
        if host.problem:
            said.append(f"{host.host}: {host.problem}")
        said += [f"{host.host}: GPU {gpu}" for gpu in host.gpus]
        if host.image is None and not host.problem:
            said.append(f"{host.host}: the image is not here")
        if host.stale_files:
            names = ", ".join(path.rpartition("/")[2] for path in host.stale_files)
            said.append(f"{host.host}: a deploy would write {names}")
        for layer in host.layers:
            failure = layer.last_failure
            if failure is not None:
                ago = duration(failure.seconds_ago)
                reason = f": {failure.reason}" if failure.reason else ""
                said.append(f"{host.host}: {layer.layer} ended {ago} ago, {failure.how}{reason}")
            if layer.unit == "failed":
                said.append(
                    f"{host.host}: {layer.layer} has ended too often and is not started again: "
                    "correct the cause, then pyinfra -y inventory.py tasks/restart.py"
                )
    said += [f"Ray: {problem}" for problem in status.ray or []]
    said.append(f"watchdog: {status.watchdog}")
    return said


def duration(seconds: int) -> str:
    """In the two largest units that are not zero."""
    parts = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"
