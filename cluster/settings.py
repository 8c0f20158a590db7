"""What a user writes in cluster.yaml: its keys, their defaults, and the rules between them.

Every value that several layers need (a fabric address, a port) is written there once; everything
else is derived in environment.py and commands.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    WithJsonSchema,
)

from cluster.positions import Keys

HOST_NAME = r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?$"
RESERVED_HOST_NAMES = frozenset({"all", "head", "workers", "inventory"})
RAY_CLIENT_PORT = 10001
"""Ray's client server (ray start --ray-client-server-port), on the head."""
RAY_WORKER_PORTS = range(10002, 20000)
"""Ray gives its worker processes ports from this range (ray start --min-worker-port)."""
HUB_TOKEN = "HF_TOKEN"  # noqa: S105 -- the name of one
"""The variable with the token of the Hugging Face hub."""
MAX_VALUE_BYTES = 32768
"""Docker reads env files in lines of at most 64 KiB (Go's bufio.MaxScanTokenSize)."""
MANAGED_FLAGS = {
    "api-key": "it would show in the process list; put VLLM_API_KEY under secrets",
    "distributed-executor-backend": "set executor",
    "gpu-memory-utilization": "set serve.gpu_memory_utilization",
    "headless": "derived from the host's role",
    "host": "set serve.host",
    "master-addr": "derived from the head's fabric address",
    "master-port": "set serve.rendezvous_port",
    "max-model-len": "set serve.max_model_len",
    "model": "set model",
    "revision": "set model.revision",
    "nnodes": "derived from hosts",
    "node-rank": "derived from hosts",
    "pipeline-parallel-size": "set serve.pipeline_parallel_size",
    "port": "set serve.port",
    "served-model-name": "set serve.served_model_name",
    "shutdown-timeout": "set deadlines.drain",
    "tensor-parallel-size": "set serve.tensor_parallel_size",
}


def _one_line(value: str) -> str:
    if any(character in value for character in "\n\r\0"):
        raise ValueError("has a line break or NUL; an env file holds one line per variable")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ValueError("has half a character (a lone surrogate) in it") from None
    if size > MAX_VALUE_BYTES:
        raise ValueError(f"has {size:,} bytes; at most {MAX_VALUE_BYTES:,}")
    return value


def _words(value: str) -> str:
    _one_line(value)
    if not value or value != value.strip():
        raise ValueError("is empty or starts or ends with a space")
    return value


def _no_option(value: str) -> str:
    _words(value)
    if value.startswith("-") or any(character.isspace() for character in value):
        raise ValueError("starts with '-' or has a space in it")
    return value


def _fabric_interface(value: Any) -> Any:
    if isinstance(value, IPv4Interface):
        return value
    if not isinstance(value, str):
        raise ValueError("is not an address in quotes or plain, such as 192.168.200.12/24")
    try:
        return IPv4Interface(value if "/" in value else f"{value}/24")
    except (AddressValueError, ValueError):
        raise ValueError(
            "is not an IPv4 address such as 192.168.200.12 or 192.168.200.12/24"
        ) from None


def _env_value(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(
            "is a YAML boolean; write it in quotes as the program expects it: 'true', '1'"
        )
    return str(value) if isinstance(value, (int, float)) else value


def _absolute(value: str) -> str:
    _words(value)
    if not value.startswith("/") or ":" in value or "," in value:
        raise ValueError("is not an absolute path (and Docker allows no ':' or ',' in it)")
    return value


Word = Annotated[str, AfterValidator(_no_option)]
Text = Annotated[str, AfterValidator(_words)]
HostPath = Annotated[str, AfterValidator(_absolute)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
Count = Annotated[int, Field(strict=True, ge=1, le=65536)]
Seconds = Annotated[int, Field(strict=True, ge=1, le=86400)]
HostName = Annotated[str, Field(pattern=HOST_NAME)]
InterfaceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,14}$")]
HcaName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+(:[0-9]+)?$")]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
FlagName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9.-]*$")]
EnvValue = Annotated[
    Annotated[str, AfterValidator(_one_line)] | None,
    BeforeValidator(_env_value),
    WithJsonSchema({"type": ["string", "number", "null"]}),
]
FlagValue = bool | int | float | Text | list[int | float | Text] | dict[str, Any]
FabricAddress = Annotated[
    IPv4Interface,
    BeforeValidator(_fabric_interface),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string"}),
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class SshDefaults(_Section):
    """How ssh reaches hosts that say nothing else."""

    user: Word | None = None
    """User to log in as; default: ssh's own. Anyone but root needs sudo."""
    port: Port = 22
    """Port of sshd."""
    key: Text | None = None
    """Private key file on this machine; default: the agent and ssh's own keys."""
    known_hosts: Text | None = None
    """known_hosts file on this machine; default: ~/.ssh/known_hosts."""


class Ssh(_Section):
    """How ssh reaches one host; what is absent comes from the top-level ssh section."""

    address: Word | None = None
    """Name or address for ssh; default: the host's name in this file."""
    user: Word | None = None
    """User to log in as."""
    port: Port | None = None
    """Port of sshd."""
    key: Text | None = None
    """Private key file on this machine."""
    known_hosts: Text | None = None
    """known_hosts file on this machine."""
    via: HostName | None = None
    """Another host of this file to jump through, for a host that only that one can reach."""


class Fabric(_Section):
    """The fast private network between the hosts: all that Ray, torch, vLLM and NCCL may use."""

    address: FabricAddress
    """This host's address on it, as `ip addr` shows it; /24 where no prefix length is written."""
    interface: InterfaceName
    """The interface that has this address."""
    hcas: list[HcaName] | None = None
    """RDMA devices of this link, both twins of a DGX Spark port. [] turns RDMA off; absent: NCCL
    looks for itself."""


class Host(_Section):
    """One machine of the cluster."""

    role: Literal["head", "worker"] = "worker"
    """head: Ray head, rank 0 and the API. Exactly one host has it."""
    ssh: Ssh = Ssh()
    """How ssh reaches it."""
    fabric: Fabric
    """Its place on the fabric."""
    gpus: Count = 1
    """GPUs to use on it."""
    env: dict[VariableName, EnvValue] = Field(default_factory=dict)
    """Variables of this host alone; they beat everything derived. null removes a variable."""


class ImageSource(_Section):
    """The vLLM image, and the way it takes to the hosts. A name alone is enough."""

    name: Word
    """By tag or digest. Executor ray needs Ray in it (stock images: up to 0.17)."""
    source: Literal["registry", "relay", "archive", "auto"] = "registry"
    """registry: every host pulls it. relay: the others get it through the head, over the fabric.
    archive: from a file on this machine. auto: relay for hosts that do not reach the registry."""
    archive: Text | None = None
    """With source archive: what docker save wrote, on this machine; also .gz, .xz, .zst."""


class ModelSource(_Section):
    """The model, and the way it takes to the hosts. A name alone is enough."""

    name: Text
    """On the Hugging Face hub, or a directory on the hosts."""
    source: Literal["hub", "path", "rsync", "archive"] | None = None
    """hub: downloaded once, on the head. path: it is on the head already. rsync, archive: from this
    machine, a directory or a tar file. Default: path where name is a directory, else hub."""
    revision: Word | None = None
    """With source hub: a branch, tag or, better, a commit; default: main as it was when the head
    first downloaded it."""
    local: Text | None = None
    """With source rsync: the directory on this machine."""
    archive: Text | None = None
    """With source archive: a tar file of the directory, on this machine; also .gz, .xz, .zst."""
    relay: bool = True
    """Bring it from the head to every other host over the fabric, where files are missing or
    differ. false: it is on every host already, or the hosts share a disk."""
    delete: bool = False
    """Delete files on the other hosts that the head does not have."""


def _from_name(value: Any) -> Any:
    if value is None:
        raise ValueError("has no value")
    return {"name": value} if isinstance(value, str) else value


class Serve(_Section):
    """vllm serve."""

    tensor_parallel_size: Count | None = None
    """Default: all GPUs of the cluster divided by pipeline_parallel_size."""
    pipeline_parallel_size: Count = 1
    """Stages of the pipeline."""
    host: Word = "0.0.0.0"  # noqa: S104 -- vLLM's own default; the README says how to close it
    """Address that the API listens on."""
    port: Port = 8000
    """Port of the API."""
    rendezvous_port: Port = 29501
    """torch's rendezvous on the head; only executor mp uses it."""
    served_model_name: Word | None = None
    """Name of the model in the API; default: model."""
    max_model_len: Count | None = None
    """Context length in tokens; default: the model's own."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of each GPU's memory; default: vLLM's. On unified memory stay at or below 0.85."""
    flags: dict[FlagName, FlagValue] = Field(default_factory=dict)
    """Any further flag of vllm serve, without the dashes. true: --flag; false: --no-flag; a list
    repeats the value; a mapping becomes JSON."""


class Ray(_Section):
    """Ray, below vLLM."""

    port: Port = 6379
    """Port of the head's GCS."""
    object_store_memory: Annotated[int, Field(strict=True, ge=80_000_000)] = 1_073_741_824
    """Bytes of shared memory for Ray's object store. vLLM puts little there, and Ray's own default
    of 30 % of the memory is missing for the model on a unified-memory host."""
    flags: dict[FlagName, FlagValue] = Field(default_factory=dict)
    """Any further flag of ray start."""


class Paths(_Section):
    """Directories on the hosts."""

    config: HostPath = "/etc/vllm"
    """Env files and what else the units read."""
    cache: HostPath = "/var/lib/vllm/cache"
    """/root/.cache of the containers: compiled kernels, and models from the hub."""
    huggingface: HostPath | None = None
    """An existing Hugging Face cache to use instead of the one in cache."""


class Container(_Section):
    """docker run, for Ray's and vLLM's containers alike."""

    gpus: Word | None = "all"
    """docker run --gpus; null on hosts without NVIDIA GPUs."""
    shm_size: Annotated[str, Field(pattern=r"^[0-9]+[bkmg]$")] = "16g"
    """Size of /dev/shm: Ray's objects and vLLM's queues live there."""
    ulimits: dict[Annotated[str, Field(pattern=r"^[a-z]+$")], Annotated[int, Field(ge=-1)]] = Field(
        default_factory=lambda: {"memlock": -1, "stack": 67108864}
    )
    """docker run --ulimit; RDMA needs memlock: -1."""
    devices: list[HostPath] = Field(default_factory=list)
    """docker run --device; /dev/infiniband is added by itself where a host names hcas."""
    privileged: bool = False
    """docker run --privileged."""
    flags: list[Text] = Field(default_factory=list)
    """Any further argument of docker run, one per item: --cap-add=SYS_PTRACE."""


class Deadlines(_Section):
    """Seconds after which a wait ends with a reason."""

    pull: Seconds = 7200
    """Pull of the image on one host."""
    ray: Seconds = 120
    """Start of Ray on one host, and until Ray lists all hosts."""
    reach: Seconds = 15
    """Until a host reaches the head's Ray over the fabric."""
    prove: Seconds = 8
    """One network layer between all hosts, before vllm serve starts."""
    serve: Seconds = 3600
    """Start of vllm serve: weights, compilation, KV cache."""
    completion: Seconds = 120
    """The completion at the end."""
    drain: Annotated[int, Field(strict=True, ge=0, le=86400)] = 30
    """Running requests may finish before vllm serve stops; new ones are refused. vLLM 0.18+."""
    stop: Seconds = 60
    """Stop of one container, beyond drain."""
    boot: Seconds = 1800
    """One wait of a unit for another host at boot; after that it fails, and systemd starts it
    again."""


class Restarts(_Section):
    """systemd starts a container that ended again, up to a limit: a crash loop leaks memory."""

    delay: Seconds = 2
    """Seconds before a restart. It doubles with every one that follows soon."""
    max_delay: Seconds = 60
    """Seconds to which the delay grows."""
    reset_after: Seconds = 60
    """A container that ran for so many seconds is restarted after `delay` again."""
    limit: Count = 10
    """Starts of one unit within `within` seconds; after that it stays down, as failed."""
    within: Seconds = 3600
    """Seconds."""


class Prove(_Section):
    """What prove expects of the network, beside that every layer goes over the fabric."""

    nccl_floor: Annotated[float, Field(gt=0)] | None = None
    """Warn below this bandwidth of an all-reduce with NCCL, in GB/s (bus bandwidth, 64 MiB).
    20 and more is normal for two DGX Sparks with both HCAs of the port."""


class Watchdog(_Section):
    """Asks for one token now and then, and restarts vllm serve when it is wedged."""

    enabled: bool = True
    """A systemd timer on the head; no daemon."""
    every: Seconds = 60
    """Seconds between two questions."""
    deadline: Seconds = 30
    """Seconds to wait for the token; after that, growing token counters mean busy, not wedged."""
    failures: Count = 3
    """Questions in a row that have to fail before a restart."""
    minimum_uptime: Seconds = 600
    """Seconds that vllm serve has to be up before it may be restarted."""
    cool_down: Seconds = 900
    """Seconds between two restarts."""
    restarts_per_hour: Count = 2
    """After so many it stops trying and says so. The second restarts Ray, too."""


class SecretSource(_Section):
    """Where a secret comes from: exactly one of env and file."""

    env: VariableName | None = None
    """A variable in the environment of pyinfra on this machine."""
    file: Text | None = None
    """A file on this machine; surrounding white space is dropped."""


class Cluster(_Section):
    """One model served by a group of hosts."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")] = "vllm"
    """Name of the cluster, shown in reports and container labels."""
    image: Annotated[
        ImageSource, BeforeValidator(_from_name, json_schema_input_type=str | ImageSource)
    ]
    """The vLLM image: its name, or a section."""
    model: Annotated[
        ModelSource, BeforeValidator(_from_name, json_schema_input_type=str | ModelSource)
    ]
    """The model: its name, or a section."""
    executor: Literal["ray", "mp"] = "ray"
    """ray, or vLLM's own --nnodes mode (mp), which needs no Ray in the image."""
    encrypt: bool = False
    """Whether image and model cross the fabric in TLS, for a fabric that others can listen to."""
    offline: bool | None = None
    """No download at run time; default: true, since a deploy has brought the model."""
    ssh: SshDefaults = SshDefaults()
    """Defaults for every host's ssh."""
    hosts: Annotated[dict[HostName, Host], Field(min_length=1)]
    """The machines, by name."""
    serve: Serve = Serve()
    """Options of vllm serve."""
    ray: Ray = Ray()
    """Options of Ray."""
    paths: Paths = Paths()
    """Directories on the hosts."""
    container: Container = Container()
    """Options of docker run."""
    deadlines: Deadlines = Deadlines()
    """Seconds."""
    restarts: Restarts = Restarts()
    """What happens to a container that ends."""
    prove: Prove = Prove()
    """What prove expects of the network."""
    watchdog: Watchdog = Watchdog()
    """What finds a wedged engine."""
    env: dict[VariableName, EnvValue] = Field(default_factory=dict)
    """Variables for all hosts; they beat everything derived. null removes a variable."""
    silence: dict[FlagName, Text] = Field(default_factory=dict)
    """Findings of preflight to leave out of the verdict, by id, each with a reason."""
    on_failure: Literal["stop", "rollback"] = "stop"
    """What a deploy does that fails once it has touched the hosts: stop there, or go back to the
    last deployment that ended in a completion, as tasks/rollback.py does."""
    secrets: dict[VariableName, SecretSource] = Field(default_factory=dict)
    """Variables whose value must not stand in this file: HF_TOKEN, VLLM_API_KEY, RAY_AUTH_TOKEN."""

    def to_json(self) -> dict[str, Any]:
        """For pyinfra's debug-inventory; secrets are named here, never held."""
        return self.model_dump(mode="json")

    @property
    def head(self) -> str:
        """The name of the head."""
        return next(name for name, host in self.hosts.items() if host.role == "head")

    @property
    def workers(self) -> list[str]:
        """The names of the workers, in the order of their ranks."""
        return [name for name, host in self.hosts.items() if host.role == "worker"]

    @property
    def nodes(self) -> list[str]:
        """All hosts by node rank: the head is 0."""
        return [self.head, *self.workers]

    @property
    def gpus(self) -> int:
        """GPUs of all hosts: the world size."""
        return sum(host.gpus for host in self.hosts.values())

    @property
    def tensor_parallel_size(self) -> int:
        """As written, or what the GPUs allow."""
        return self.serve.tensor_parallel_size or self.gpus // self.serve.pipeline_parallel_size

    @property
    def is_offline(self) -> bool:
        """True where nothing may be downloaded at run time."""
        return True if self.offline is None else self.offline

    @property
    def container_secrets(self) -> dict[str, SecretSource]:
        """The secrets that the containers need.

        The hub's token is not among them where a deploy brings the model: it goes to the head, for
        the time of the download.
        """
        needless = {HUB_TOKEN} if self.is_offline else set()
        return {name: source for name, source in self.secrets.items() if name not in needless}

    @property
    def model_is_directory(self) -> bool:
        """True where the model is a path on the hosts."""
        return self.model.name.startswith("/")

    @property
    def model_source(self) -> Literal["hub", "path", "rsync", "archive"]:
        """As written, or what the name tells."""
        return self.model.source or ("path" if self.model_is_directory else "hub")

    @property
    def served_model_name(self) -> str:
        """The model's name in the API."""
        return self.serve.served_model_name or self.model.name

    def address(self, name: str) -> IPv4Address:
        """The fabric address of a host."""
        return self.hosts[name].fabric.address.ip

    @property
    def head_address(self) -> IPv4Address:
        """The head's fabric address: rendezvous, Ray's GCS."""
        return self.address(self.head)

    @property
    def subnet(self) -> IPv4Network:
        """The fabric's subnet."""
        return self.hosts[self.head].fabric.address.network

    @property
    def gcs_address(self) -> str:
        """ADDRESS:PORT of Ray's GCS."""
        return f"{self.head_address}:{self.ray.port}"

    def ssh_of(self, name: str) -> Ssh:
        """How ssh reaches a host, defaults filled in."""
        own = self.hosts[name].ssh
        return Ssh(
            address=own.address or name,
            user=own.user or self.ssh.user,
            port=own.port or self.ssh.port,
            key=own.key or self.ssh.key,
            known_hosts=own.known_hosts or self.ssh.known_hosts,
            via=own.via,
        )


@dataclass(frozen=True)
class Problem:
    """Something wrong with cluster.yaml, at one place in it."""

    keys: Keys
    message: str


def problems(cluster: Cluster) -> Iterator[Problem]:
    """Check what no single key can tell: the rules between hosts, sizes and ports."""
    yield from _roles(cluster)
    yield from _fabric(cluster)
    yield from _jumps(cluster)
    yield from _sizes(cluster)
    yield from _ports(cluster)
    yield from _flags(cluster)
    yield from _secrets(cluster)
    yield from _sources(cluster)


def _sources(cluster: Cluster) -> Iterator[Problem]:
    image, model = cluster.image, cluster.model
    if (image.source == "archive") != (image.archive is not None):
        yield Problem(
            ("image", "archive"), "image.source: archive and image.archive belong together"
        )
    elif image.archive and not Path(image.archive).expanduser().is_file():
        yield Problem(("image", "archive"), f"there is no file {image.archive} on this machine")
    is_hub = cluster.model_source == "hub"
    if is_hub and cluster.model_is_directory:
        yield Problem(
            ("model", "source"), "a directory is not on the hub; set path, rsync or archive"
        )
    if not is_hub and not cluster.model_is_directory:
        yield Problem(
            ("model", "name"),
            f"with source {cluster.model_source} it is a directory on the hosts: /srv/models/NAME",
        )
    if model.revision and not is_hub:
        yield Problem(("model", "revision"), "only the hub has revisions")
    if (cluster.model_source == "rsync") != (model.local is not None):
        yield Problem(("model", "local"), "model.source: rsync and model.local belong together")
    elif model.local and not Path(model.local).expanduser().is_dir():
        yield Problem(("model", "local"), f"there is no directory {model.local} on this machine")
    if (cluster.model_source == "archive") != (model.archive is not None):
        yield Problem(
            ("model", "archive"), "model.source: archive and model.archive belong together"
        )
    elif model.archive and not Path(model.archive).expanduser().is_file():
        yield Problem(("model", "archive"), f"there is no file {model.archive} on this machine")


def _roles(cluster: Cluster) -> Iterator[Problem]:
    heads = [name for name, host in cluster.hosts.items() if host.role == "head"]
    if not heads:
        yield Problem(("hosts",), "no host is the head; give one of them role: head")
    for name in heads[1:]:
        yield Problem(
            ("hosts", name, "role"), f"second head: {heads[0]} is the head; make this one a worker"
        )
    for name in cluster.hosts:
        if name in RESERVED_HOST_NAMES:
            yield Problem(("hosts", name), "this name is a group of pyinfra's; choose another")


def _fabric(cluster: Cluster) -> Iterator[Problem]:
    first = next(iter(cluster.hosts))
    subnet = cluster.hosts[first].fabric.address.network
    owners: dict[IPv4Address, str] = {}
    for name, host in cluster.hosts.items():
        address, keys = host.fabric.address, ("hosts", name, "fabric", "address")
        if address.ip in owners:
            yield Problem(keys, f"{address.ip} is the address of {owners[address.ip]} too")
        elif address.network != subnet:
            yield Problem(
                keys,
                f"{address.ip} is in {address.network}, but {first} is in {subnet}; "
                "all fabric addresses belong to one subnet",
            )
        elif address.ip.is_loopback or address.ip.is_multicast or address.ip.is_unspecified:
            yield Problem(keys, f"{address.ip} is no address that another host could reach")
        elif subnet.prefixlen < 31 and address.ip in (subnet[0], subnet[-1]):
            yield Problem(keys, f"{address.ip} is the network or broadcast address of {subnet}")
        owners.setdefault(address.ip, name)


def _jumps(cluster: Cluster) -> Iterator[Problem]:
    for name, host in cluster.hosts.items():
        keys = ("hosts", name, "ssh", "via")
        seen, via = [name], host.ssh.via
        while via is not None:
            if via not in cluster.hosts:
                if seen == [name]:
                    known = ", ".join(cluster.hosts)
                    yield Problem(keys, f"no host named {via!r} here; the hosts are {known}")
                break
            if via in seen:
                if via == name:
                    yield Problem(keys, f"a circle: {' -> '.join([*seen, via])}")
                break
            seen.append(via)
            via = cluster.hosts[via].ssh.via


def _sizes(cluster: Cluster) -> Iterator[Problem]:
    pipeline, tensor = cluster.serve.pipeline_parallel_size, cluster.serve.tensor_parallel_size
    gpus = ", ".join(f"{name} {host.gpus}" for name, host in cluster.hosts.items())
    if tensor is not None and tensor * pipeline != cluster.gpus:
        yield Problem(
            ("serve", "tensor_parallel_size"),
            f"{tensor} x pipeline_parallel_size {pipeline} = {tensor * pipeline} ranks, but the "
            f"hosts have {cluster.gpus} GPUs ({gpus}); the two have to be equal",
        )
    elif tensor is None and cluster.gpus % pipeline:
        yield Problem(
            ("serve", "pipeline_parallel_size"),
            f"{cluster.gpus} GPUs ({gpus}) cannot be divided by {pipeline}",
        )
    if cluster.executor == "mp" and len({host.gpus for host in cluster.hosts.values()}) > 1:
        # vLLM takes rank // device_count() for the node (facts: create_from_process_group).
        yield Problem(("executor",), f"mp needs the same number of GPUs on every host ({gpus})")


def _ports(cluster: Cluster) -> Iterator[Problem]:
    named: list[tuple[Keys, int]] = [(("serve", "port"), cluster.serve.port)]
    if cluster.executor == "ray":
        named.append((("ray", "port"), cluster.ray.port))
    else:
        named.append((("serve", "rendezvous_port"), cluster.serve.rendezvous_port))
    taken: dict[int, str] = {}
    for keys, port in named:
        label = ".".join(str(key) for key in keys)
        if port in taken:
            yield Problem(keys, f"{port} is {taken[port]} too; every port is its own")
        taken.setdefault(port, label)
        if cluster.executor == "ray" and (port == RAY_CLIENT_PORT or port in RAY_WORKER_PORTS):
            yield Problem(
                keys,
                f"{port} lies in {RAY_CLIENT_PORT}-{RAY_WORKER_PORTS[-1]}, which Ray gives to its "
                "own processes; choose another",
            )


def _flags(cluster: Cluster) -> Iterator[Problem]:
    for flag in cluster.serve.flags:
        if flag in MANAGED_FLAGS:
            yield Problem(("serve", "flags", flag), f"not here: {MANAGED_FLAGS[flag]}")
    for flag in cluster.ray.flags:
        if flag in {"address", "block", "head", "node-ip-address", "num-gpus", "port"}:
            yield Problem(("ray", "flags", flag), "not here: derived from the hosts and ray.port")


def _secrets(cluster: Cluster) -> Iterator[Problem]:
    for name, source in cluster.secrets.items():
        keys = ("secrets", name)
        if (source.env is None) == (source.file is None):
            yield Problem(keys, "give exactly one source: env: VARIABLE or file: PATH")
            continue
        try:
            _one_line(read_secret(source).get_secret_value())
        except ValueError as error:
            yield Problem(keys, str(error))
        env_keys: list[Keys] = [("env", name)] if name in cluster.env else []
        env_keys += [
            ("hosts", host, "env", name)
            for host in cluster.hosts
            if name in cluster.hosts[host].env
        ]
        for other in env_keys:
            yield Problem(other, "this variable stands under secrets too; write it in one place")


def read_secret(source: SecretSource) -> SecretStr:
    """Read a secret from where it is kept. Raises ValueError, which names the place."""
    if source.env is not None:
        value = os.environ.get(source.env)
        if not value:
            raise ValueError(f"the environment variable {source.env} is not set on this machine")
        return SecretStr(value)
    path = Path(source.file or "").expanduser()
    try:
        value = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from None
    if not value:
        raise ValueError(f"{path} is empty")
    return SecretStr(value)


def flag_arguments(flags: dict[str, FlagValue]) -> list[str]:
    """Turn a mapping of flags into arguments: {"enforce-eager": True} -> ["--enforce-eager"]."""
    arguments: list[str] = []
    for flag, value in flags.items():
        if value is True:
            arguments.append(f"--{flag}")
        elif value is False:
            arguments.append(f"--no-{flag}")
        elif isinstance(value, list):
            arguments += [f"--{flag}", *(str(item) for item in value)]
        elif isinstance(value, dict):
            arguments += [f"--{flag}", json.dumps(value, sort_keys=True)]
        else:
            arguments += [f"--{flag}", str(value)]
    return arguments
