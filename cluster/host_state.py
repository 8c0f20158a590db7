"""What the hosts say of themselves, as values: the answers of remote/node_state.py and others."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.image import repository


@dataclass(frozen=True)
class ImageState:
    """An image in a host's Docker."""

    id: str
    digests: list[str]
    content: str = ""
    """A hash of its layers and configuration: equal for equal images in either of Docker's stores,
    and after a relay, which leaves no digests."""

    def digest(self, reference: str) -> str:
        """What identifies the image on every host: the registry's digest, else Docker's id."""
        wanted = repository(reference)
        for digest in self.digests:
            name, _, value = digest.partition("@")
            if name == wanted or name.endswith(f"/{wanted}"):
                return value
        return self.id


@dataclass(frozen=True)
class ContainerState:
    """A container in a host's Docker. `definition` is our label."""

    id: str
    image: str
    status: str
    definition: str | None


@dataclass(frozen=True)
class Failure:
    """The last time that a unit ended by itself."""

    seconds_ago: int
    how: str
    """In systemd's words."""
    reason: str
    """The last line before that matters; "" where there is none."""


@dataclass(frozen=True)
class HostReport:
    """What only a report shows of a host."""

    failures: dict[str, Failure]
    """By unit."""
    gpus: list[list[str]]
    """Per GPU: index, name, memory used and total (MiB), utilization (%)."""
    ray: list[str] | None
    """What Ray lacks; None where it was not asked."""


@dataclass(frozen=True)
class HostState:
    """What is on a host; see remote/node_state.py."""

    docker_error: str | None
    systemd_error: str | None
    image: ImageState | None
    containers: dict[str, ContainerState]
    units: dict[str, dict[str, str]]
    files: dict[str, str | None]
    secret_files: dict[str, str | None]
    listening: bool
    addresses: dict[str, list[str]]
    watchdog: str = ""
    known_good: list[str] = field(default_factory=list)
    """Names of the archives of known_good.py, the newest first."""
    report: HostReport | None = None

    def has_unit(self, name: str) -> bool:
        """Whether systemd knows a unit."""
        return self.unit(name, "LoadState") not in {"", "not-found"}

    def unit(self, name: str, key: str) -> str:
        """A property of a unit as systemctl show gives it; "" where there is none."""
        return self.units.get(name, {}).get(key, "")


@dataclass(frozen=True)
class Answer:
    """A completion, or why there is none; and what /metrics says, where it was asked for."""

    seconds: float
    text: str = ""
    tokens: int | None = None
    error: str | None = None
    metrics: dict[str, float] | None = None
