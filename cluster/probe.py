"""What remote/probe.py says of a host, as typed values. Pure."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Interface(_Part):
    """A network interface. `addresses` are ADDRESS/PREFIX, `device` is its place on the bus."""

    name: str
    kind: str
    mtu: int | None = None
    carrier: bool = False
    speed_mbps: int | None = None
    driver: str | None = None
    device: str | None = None
    addresses: list[str] = Field(default_factory=list)


class Gid(_Part):
    """An entry of an RDMA port's GID table."""

    index: int
    gid: str
    ipv4: str | None = None
    type: str | None = None


class Hca(_Part):
    """A port of an RDMA device. `state` is ACTIVE, DOWN, INIT, ..."""

    name: str
    port: int
    state: str = ""
    link_layer: str | None = None
    interfaces: list[str] = Field(default_factory=list)
    gids: list[Gid] = Field(default_factory=list)

    @property
    def roce_v2(self) -> list[Gid]:
        """The GIDs that NCCL can use over IPv4."""
        return [gid for gid in self.gids if gid.ipv4 and gid.type == "RoCE v2"]


class Gpu(_Part):
    """A GPU; `memory_bytes` is None on unified memory."""

    index: int
    name: str
    driver: str
    memory_bytes: int | None = None


class Docker(_Part):
    """Docker's daemon, or why it does not answer."""

    error: str | None = None
    root: str | None = None
    runtimes: list[str] = Field(default_factory=list)


class Space(_Part):
    """Free bytes at a path."""

    path: str
    exists: bool
    free_bytes: int


class Listener(_Part):
    """A process that listens on a port we need."""

    port: int
    pid: int
    program: str


class OtherProcess(_Part):
    """A process of Ray or vLLM that is not in our containers."""

    pid: int
    command: str


class OwnName(_Part):
    """A container under one of our names."""

    name: str
    ours: bool
    running: bool


class Failure(_Part):
    """A connection that could not be made."""

    peer: str
    port: int
    error: str


class Meeting(_Part):
    """What came of meeting the other hosts. `frames`: did a full-size packet arrive at the peer."""

    failures: list[Failure] = Field(default_factory=list)
    frames: dict[str, bool] = Field(default_factory=dict)


class Probe(_Part):
    """One host. Memory is in bytes, by the names of /proc/meminfo; time in Unix seconds.

    `default_routes` are interfaces, best metric first.
    """

    hostname: str
    hostname_addresses: list[str] = Field(default_factory=list)
    kernel: str | None = None
    product: str | None = None
    interfaces: list[Interface] = Field(default_factory=list)
    ip_error: str | None = None
    default_routes: list[str] = Field(default_factory=list)
    hcas: list[Hca] = Field(default_factory=list)
    infiniband_devices: bool = False
    memory: dict[str, int] = Field(default_factory=dict)
    gpus: list[Gpu] = Field(default_factory=list)
    gpu_error: str | None = None
    docker: Docker = Docker()
    model: Space | None = None
    docker_space: Space | None = None
    containers: list[OwnName] = Field(default_factory=list)
    processes: list[OtherProcess] = Field(default_factory=list)
    listeners: list[Listener] = Field(default_factory=list)
    auth_token: bool = False
    meeting: Meeting | None = None
    time: float = 0

    def interface(self, name: str) -> Interface | None:
        """An interface by its name."""
        return next((each for each in self.interfaces if each.name == name), None)

    @property
    def addresses(self) -> dict[str, list[str]]:
        """The IPv4 addresses of each interface, without prefix lengths."""
        return {
            each.name: [address.partition("/")[0] for address in each.addresses]
            for each in self.interfaces
            if each.addresses
        }

    @property
    def is_unified_memory(self) -> bool:
        """Whether GPU and CPU share one memory: nvidia-smi then knows no GPU memory."""
        return bool(self.gpus) and all(gpu.memory_bytes is None for gpu in self.gpus)
