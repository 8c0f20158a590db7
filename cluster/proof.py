"""What the ranks' reports of remote/prove.py mean: a verdict and a remedy per layer and host. Pure.

A layer that fails usually fails on several hosts, and mostly because of one of them. Rules look for
the host that has the cause; the others are told to look there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from ipaddress import AddressValueError, IPv4Address
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from cluster import commands
from cluster.environment import node_environment
from cluster.settings import Cluster

PROVE = "vllm-prove"
"""Name of the container that proves where none of ours runs before vllm serve (executor mp)."""
State = Literal["ok", "warning", "failed", "hangs", "not tried", "skipped"]
BAD: tuple[State, ...] = ("failed", "hangs", "not tried")
Cause = tuple[str, str]
"""(what is wrong on this very host, what to do)"""
AGAIN = "pyinfra -y inventory.py tasks/environment.py tasks/ray_head.py tasks/ray_workers.py"


class Result(BaseModel):
    """What one rank says of one layer."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    state: State
    seconds: float = 0
    addresses: list[str] = []
    dialling: list[str] = []
    reason: str = ""
    missing: list[int] = []
    complaints: list[str] = []
    gcs: str | None = None
    no_gpu: bool = False
    busbw_gb_s: float | None = None
    bytes: int | None = None
    latency_us: int | None = None
    nccl: str | None = None
    nccl_lines: list[str] = []


class Report(BaseModel):
    """What one rank says."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rank: int
    hostname: str
    addresses: dict[str, list[str]]
    environment: dict[str, str]
    seconds: float
    layers: dict[str, Result] = {}
    error: str | None = None

    def interface(self, address: str) -> str | None:
        """The interface here that has an address; all of 127/8 belongs to lo."""
        owner = (name for name, owned in self.addresses.items() if address in owned)
        return next(owner, "lo" if address.startswith("127.") else None)


@dataclass(frozen=True)
class Verdict:
    """One layer on one host."""

    layer: str
    host: str
    state: State
    addresses: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    found: str = ""
    remedy: str = ""
    evidence: tuple[str, ...] = ()
    seconds: float = 0

    @property
    def cell(self) -> str:
        """In a table: the address really used, and its interface."""
        places = [f"{a} {i}" for a, i in zip(self.addresses, self.interfaces, strict=True)]
        parts = [self.state, *places]
        if self.layer == "nccl" and self.state in {"ok", "warning"}:
            parts.append(self.found)
        return " ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """All of it, for machines."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class NcclLog:
    """What NCCL says about the way it takes, at NCCL_DEBUG=INFO."""

    bootstrap: tuple[str, str] | None = None
    """(interface, address)"""
    sockets: list[tuple[str, str]] = field(default_factory=list)
    """(interface, address) of every network of NET/Socket."""
    devices: list[str] = field(default_factory=list)
    """HCA:port of every device of NET/IB."""
    transports: list[str] = field(default_factory=list)
    """IB, Socket, or a plugin's name, from the channels."""
    gids: list[int] = field(default_factory=list)
    """Indexes of the GIDs of the queue pairs (RoCE)."""
    warnings: list[str] = field(default_factory=list)

    @property
    def transport(self) -> str | None:
        """How tensors travel."""
        return "/".join(self.transports) or None


_NETWORK = re.compile(r"(?:\[\d+\])?([A-Za-z0-9_.@-]+):([0-9a-fA-F.:%\w]+?)<\d+>")
_DEVICE = re.compile(r"\[\d+\]([A-Za-z0-9_.+-]+:\d+)/(?:IB|RoCE)\b")


def read_nccl(lines: list[str]) -> NcclLog:
    """Parse NCCL's lines of INIT and NET.

    `NET/IB : Using [RO]; OOB ...` comes without any device too (facts: seen with 2.28.9), so only a
    named device counts, and what the channels say: `via NET/IB/0`.
    """
    log: dict[str, Any] = {
        "sockets": [],
        "devices": [],
        "transports": [],
        "gids": [],
        "warnings": [],
    }

    def add(key: str, values: list[Any]) -> None:
        log[key] += [value for value in values if value not in log[key]]

    for line in lines:
        if match := re.search(r"Bootstrap ?: Using (\S+)", line):
            network = _NETWORK.search(match[1])
            log["bootstrap"] = (network[1], network[2]) if network else None
        elif match := re.search(r"NET/Socket ?: Using (.*)", line):
            add("sockets", _NETWORK.findall(match[1]))
        elif match := re.search(r"NET/IB ?: Using (.*?)(?:; OOB (.*)|$)", line):
            add("devices", _DEVICE.findall(match[1]))
            network = _NETWORK.search(match[2] or "")
            if network:
                log.setdefault("bootstrap", (network[1], network[2]))
        elif match := re.search(r"via NET/([^/]+)/\d+", line):
            add("transports", [match[1]])
        elif match := re.search(r"\bqpn \d+ .*\bGID (\d+) \(", line):
            add("gids", [int(match[1])])
        if match := re.search(r"NCCL WARN (.*)", line):
            add("warnings", [match[1].strip()])
    return NcclLog(**log)


def argument(cluster: Cluster, ranks: list[str], name: str, port: int) -> dict[str, Any]:
    """The argument of remote/prove.py on node `name`; `ranks` are the hosts that take part.

    `port` is of the store on the first of them, and the same on all.
    """
    return {
        "rank": ranks.index(name),
        "world": len(ranks),
        "head": str(cluster.address(ranks[0])),
        "port": port,
        "seconds": cluster.deadlines.prove,
        "gcs": cluster.gcs_address if cluster.executor == "ray" else None,
    }


def command(cluster: Cluster, name: str, image: str, wanted: dict[str, Any]) -> list[str]:
    """The command that runs remote/prove.py on node `name`; the program comes over stdin.

    In Ray's own container, or, where nothing runs before vllm serve (mp), in one like its.
    """
    program = ["-", "prove", json.dumps(wanted)]
    if cluster.executor == "ray":
        return ["docker", "exec", "-i", commands.RAY, "python3", *program]
    return [
        *commands.docker_run(cluster, name, PROVE),
        *("-i", f"--shm-size={cluster.container.shm_size}", "--entrypoint=python3"),
        *(*cluster.container.flags, image, *program),
    ]


def layers(cluster: Cluster) -> list[str]:
    """The layers, from the bottom of a start to its top."""
    return [*(["ray"] if cluster.executor == "ray" else []), "c10d", "gloo", "queue", "nccl"]


def judge(
    cluster: Cluster, ranks: list[str], reports: dict[str, Report], absent: dict[str, Cause]
) -> list[Verdict]:
    """Judge every layer on every host; `ranks` are the hosts that took part, by rank.

    `absent` says of a host without a report what happened there, and what to do.
    """
    scene = _Scene(cluster, ranks, reports)
    verdicts: list[Verdict] = []
    for layer in layers(cluster):
        causes = {name: _CAUSES[layer](scene, name) for name in reports}
        culprits = [name for name in ranks if name in absent or causes.get(name)]
        for name in ranks:
            if name in reports:
                verdicts.append(_verdict(scene, layer, name, causes[name], culprits))
            elif layer == layers(cluster)[0]:
                verdicts.append(Verdict(layer, name, "failed", (), (), *absent[name]))
            else:
                verdicts.append(Verdict(layer, name, "not tried"))
    return verdicts


@dataclass(frozen=True)
class _Scene:
    cluster: Cluster
    ranks: list[str]
    reports: dict[str, Report]

    def result(self, layer: str, name: str) -> Result:
        report = self.reports[name]
        reason = report.error or "no result"
        return report.layers.get(layer, Result(state="failed", reason=reason))

    def is_on_fabric(self, address: str) -> bool:
        try:
            return IPv4Address(address) in self.cluster.subnet
        except AddressValueError:
            return False

    def off_fabric(self, layer: str, name: str) -> str:
        """The addresses of a layer that are not on the fabric, with their interfaces."""
        report = self.reports[name]
        return ", ".join(
            f"{address} ({report.interface(address) or 'not an address of this host'})"
            for address in self.result(layer, name).addresses
            if not self.is_on_fabric(address)
        )

    def owner(self, address: str) -> str | None:
        """Whose address that is."""
        if address.startswith("127."):
            return None
        for name, report in self.reports.items():
            interface = report.interface(address)
            if interface is not None:
                return f"{name}'s {interface}"
        return None

    def network(self, name: str) -> str:
        """The interfaces of a host and their addresses."""
        pairs = self.reports[name].addresses.items()
        return ", ".join(f"{interface} {' '.join(owned)}".strip() for interface, owned in pairs)

    def variable(self, name: str, variable: str) -> Cause:
        """How a variable came to its value on a host, and which line of cluster.yaml to change."""
        cluster, actual = self.cluster, self.reports[name].environment.get(variable)
        host = cluster.hosts[name]
        expected = {each.name: each.value for each in node_environment(cluster, name)}.get(variable)
        found = f"{variable} is {actual}" if actual else f"{variable} is not set"
        value = _derived(cluster, name).get(variable)
        then = f"; then it is {value}, derived from the hosts" if value else ""
        if actual != expected and (actual or expected):
            return (
                f"{found} in the container, though cluster.yaml gives {expected or 'none'}",
                f"the container on {name} is older than cluster.yaml, or container.flags or the "
                f"image set {variable}; {AGAIN}",
            )
        for values, place in ((host.env, f"hosts.{name}.env"), (cluster.env, "env")):
            if variable in values:
                what = f"{place}.{variable}"
                if values[variable] is None:
                    return (
                        f"{found}: {place} removes it",
                        f"delete {what}: null in cluster.yaml{then}",
                    )
                return f"{found}, from {place}", f"delete {what} in cluster.yaml{then}"
        return found, f"correct hosts.{name}.fabric in cluster.yaml"


def _derived(cluster: Cluster, name: str) -> dict[str, str]:
    """The environment of a node as it would be without any env in cluster.yaml."""
    hosts = {each: host.model_copy(update={"env": {}}) for each, host in cluster.hosts.items()}
    bare = cluster.model_copy(update={"env": {}, "hosts": hosts})
    return {each.name: each.value for each in node_environment(bare, name)}


def _verdict(
    scene: _Scene, layer: str, name: str, cause: Cause | None, culprits: list[str]
) -> Verdict:
    result, report = scene.result(layer, name), scene.reports[name]
    state, found, remedy = result.state, _story(scene, result), ""
    evidence: list[str] = []
    if cause is not None:
        remedy = cause[1]
        if state in BAD:
            found = f"{cause[0]}; {found}" if found else cause[0]
        else:
            state, found = "failed", cause[0]
    elif state in BAD:
        others = [each for each in culprits if each != name]
        remedy = f"see {', '.join(others)}" if others else _unexplained(scene, name, result)
        evidence = [] if remedy.startswith("see ") else result.complaints[-1:]
    elif layer == "nccl":
        state, found, remedy = _nccl_summary(scene, name, result)
    return Verdict(
        *(layer, name, state, tuple(result.addresses)),
        tuple(report.interface(address) or "?" for address in result.addresses),
        *(found, remedy, tuple(evidence), result.seconds),
    )


def _names(scene: _Scene, result: Result) -> list[str]:
    """The hosts that a result speaks of."""
    return [scene.ranks[rank] for rank in result.missing if rank < len(scene.ranks)]


def _story(scene: _Scene, result: Result) -> str:
    names = _names(scene, result)
    text = f"{', '.join(names)} {result.reason}" if names else result.reason
    others: list[str] = []
    for place in result.dialling:
        owner = scene.owner(place.rpartition(":")[0])
        label = f"{place} ({owner})" if owner else place
        if place in text:
            text = text.replace(place, label)
        else:
            others.append(label)
    return f"{text}, dialling {', '.join(others)}" if others else text


def _unexplained(scene: _Scene, name: str, result: Result) -> str:
    own = scene.cluster.address(name)
    for place in result.dialling:
        address, _, port = place.rpartition(":")
        owner = next((e for e in scene.ranks if str(scene.cluster.address(e)) == address), None)
        if owner is not None:
            return (
                f"open all TCP ports of {owner} ({address}) to {name} ({own}): {port} does not get "
                "through, and every layer takes ports as the kernel gives them (nft list ruleset)"
            )
    if result.missing:
        return f"see {', '.join(_names(scene, result))}"
    if "is taken here" in result.reason:
        return "run it again; it takes another port each time"
    return (
        f"nothing in cluster.yaml explains it: see what {name} said; a slow host may need more "
        "seconds in deadlines.prove"
    )


def _ray_cause(scene: _Scene, name: str) -> Cause | None:
    result, wanted = scene.result("ray", name), str(scene.cluster.address(name))
    if result.gcs is not None and result.gcs != scene.cluster.gcs_address:
        return scene.variable(name, "RAY_ADDRESS")
    if result.addresses and result.addresses != [wanted]:
        return (
            f"Ray knows this node as {scene.off_fabric('ray', name) or result.addresses[0]}, not "
            f"as hosts.{name}.fabric.address {wanted}",
            f"start Ray on it with that address: {AGAIN}",
        )
    if "no raylet" in result.reason:
        return result.reason, f"start Ray on it: {AGAIN}"
    return None


def _c10d_cause(scene: _Scene, name: str) -> Cause | None:
    off = scene.off_fabric("c10d", name)
    if not off:
        return None
    return (
        f"it goes to {scene.cluster.head_address} from {off}, not over the fabric",
        f"a route of {name} leads to the fabric over another interface (ip route get "
        f"{scene.cluster.head_address}); correct it, or hosts.{name}.fabric",
    )


def _gloo_cause(scene: _Scene, name: str) -> Cause | None:
    result, report = scene.result("gloo", name), scene.reports[name]
    found, remedy = scene.variable(name, "GLOO_SOCKET_IFNAME")
    if match := re.search(r"Unable to find address for: (\S+)", result.reason):
        has = scene.network(name)
        return f"{found}: no interface {match[1]} with an address here (it has {has})", remedy
    off = scene.off_fabric("gloo", name)
    chosen = report.environment.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if not off and result.state in {"failed", "hangs"}:
        owned = report.addresses.get(chosen, [])
        if not any(scene.is_on_fabric(address) for address in owned):
            off = " ".join(owned)
            if not chosen:
                return f"{found}, so gloo listens where its hostname resolves to", remedy
            off = off or "no address of its own"
    if not off:
        return None
    if not chosen:
        return f"{found}, and the hostname {report.hostname} resolves to {off}", remedy
    return f"gloo listens on {off}, not on the fabric: {found}", remedy


def _queue_cause(scene: _Scene, name: str) -> Cause | None:
    result, report = scene.result("queue", name), scene.reports[name]
    found, remedy = scene.variable(name, "VLLM_HOST_IP")
    if "VLLM_HOST_IP" not in report.environment:
        found += ", so the default route decides"
    off = scene.off_fabric("queue", name)
    if off:
        return f"vLLM's queue is at {off}, not on the fabric: {found}", remedy
    strange = [each for each in result.addresses if report.interface(each) is None]
    if strange:
        return f"{strange[0]} is not an address of this host: {found}", remedy
    return None


def _nccl_cause(scene: _Scene, name: str) -> Cause | None:
    return next(_nccl_causes(scene, name), None)


def _nccl_causes(scene: _Scene, name: str) -> Iterator[Cause]:
    result, cluster = scene.result("nccl", name), scene.cluster
    if result.no_gpu or (result.state == "skipped" and cluster.container.gpus is not None):
        yield (
            f"torch sees no GPU in the container, and container.gpus is {cluster.container.gpus}",
            f"does `nvidia-smi` work on {name} and in its container? Install the NVIDIA container "
            "toolkit there; container.gpus: null is for hosts without NVIDIA GPUs",
        )
        return
    log, hcas = read_nccl(result.nccl_lines), cluster.hosts[name].fabric.hcas
    found, remedy = scene.variable(name, "NCCL_SOCKET_IFNAME")
    absent = any("no socket interface found" in line for line in log.warnings)
    if absent or (result.state in BAD and _names_no_interface(scene.reports[name])):
        yield f"{found}: no such interface here (it has {scene.network(name)})", remedy
    off = [f"{interface} {a}" for interface, a in log.sockets if not scene.is_on_fabric(a)]
    if (
        off and "Socket" in log.transports
    ):  # it works, which is worse than a hang: nobody looks for it
        way = "all" if len(off) == len(log.sockets) else f"one part in {len(log.sockets)}"
        yield f"NCCL sends {way} of the tensors over {', '.join(off)}: {found}", remedy
    if log.bootstrap is not None and not scene.is_on_fabric(log.bootstrap[1]):
        yield f"NCCL starts from {' '.join(log.bootstrap)}, not from the fabric: {found}", remedy
    for line in log.warnings:
        if "Duplicate GPU detected" in line:
            what = "NCCL takes two hosts for one: "
            if "NCCL_HOSTID" in scene.reports[name].environment:
                found, remedy = scene.variable(name, "NCCL_HOSTID")
                yield f"{what}{found}", remedy
            yield f"{what}{line}", "give them different hostnames"
    chosen = scene.reports[name].environment.get("NCCL_IB_HCA", "")
    if hcas:
        yield from _hca_causes(scene, name, hcas, log)
    elif chosen and not chosen.startswith("^") and log.transports and "IB" not in log.transports:
        found, remedy = scene.variable(name, "NCCL_IB_HCA")
        yield (
            f"fell back to TCP: {found}, and NCCL found no such device",
            f"{remedy}; is it in /sys/class/infiniband of {name}, and its port ACTIVE?",
        )
    elif "NCCL_NET" in scene.reports[name].environment and _finds_no_network(log):
        found, remedy = scene.variable(name, "NCCL_NET")
        yield f"NCCL finds no such network: {found}", remedy
    elif hcas is not None and "IB" in log.transports:
        found, remedy = scene.variable(name, "NCCL_IB_DISABLE")
        yield f"tensors travel over RDMA, though hosts.{name}.fabric.hcas is []: {found}", remedy


def _names_no_interface(report: Report) -> bool:
    """Whether NCCL_SOCKET_IFNAME (prefixes, or after = whole names) matches no interface here.

    NCCL says so on one rank; the others only see that one go.
    """
    chosen = report.environment.get("NCCL_SOCKET_IFNAME", "")
    if not chosen or chosen.startswith("^"):
        return False
    names = chosen.removeprefix("=").split(",")
    if chosen.startswith("="):
        return not any(name in report.addresses for name in names)
    return not any(owned.startswith(name) for name in names for owned in report.addresses)


def _hca_causes(scene: _Scene, name: str, hcas: list[str], log: NcclLog) -> Iterator[Cause]:
    key = f"hosts.{name}.fabric.hcas"
    wanted, used = {_port(hca) for hca in hcas}, {_port(device) for device in log.devices}
    failed = _finds_no_network(log)
    if failed or (log.transports and "IB" not in log.transports):
        expected = {each.name: each.value for each in node_environment(scene.cluster, name)}
        actual = scene.reports[name].environment
        odd = next(
            (
                variable
                for variable, value in (
                    ("NCCL_IB_DISABLE", "0"),
                    ("NCCL_NET", "IB"),
                    ("NCCL_IB_HCA", ",".join(hcas)),
                )
                if variable in {*actual, *expected} and actual.get(variable) != value
            ),
            None,
        )
        what = "NCCL finds no network" if failed else "fell back to TCP"
        what += f", though {key} promises RDMA over {', '.join(hcas)}"
        if odd:
            found, remedy = scene.variable(name, odd)
            yield f"{what}: {found}", remedy
        else:
            yield (
                what,
                f"are these the names in /sys/class/infiniband of {name}, their ports ACTIVE, and "
                f"/dev/infiniband in the container? Correct {key}, or set it to [] for TCP",
            )
    elif log.devices and wanted - used:
        missing = ", ".join(sorted(wanted - used))
        yield (
            f"NCCL does not use {missing}, which {key} names; it uses {', '.join(log.devices)}",
            f"is its port ACTIVE on {name}, and has it an address? One port of a DGX Spark is two "
            f"HCAs, and without one of them half of the bandwidth is gone. Else correct {key}",
        )
    elif log.devices and used - wanted:
        extra = ", ".join(sorted(used - wanted))
        found, _ = scene.variable(name, "NCCL_IB_HCA")
        yield (
            f"NCCL uses {extra} too, which {key} does not name: {found}",
            "NCCL takes names as prefixes; put = before the first one in env.NCCL_IB_HCA",
        )


def _finds_no_network(log: NcclLog) -> bool:
    return any("Failed to initialize any NET" in line for line in log.warnings)


def _port(hca: str) -> str:
    return hca if ":" in hca else f"{hca}:1"


def _nccl_summary(scene: _Scene, name: str, result: Result) -> tuple[State, str, str]:
    if result.state != "ok":
        return result.state, result.reason, ""
    log = read_nccl(result.nccl_lines)
    parts = [f"NET/{log.transport}" if log.transport else "transport unknown"]
    parts += [device.removesuffix(":1") for device in log.devices if "IB" in log.transports]
    if log.gids:
        parts.append(f"GID {', '.join(map(str, log.gids))}")
    if result.busbw_gb_s is not None:
        parts.append(f"{result.busbw_gb_s:g} GB/s")
    if result.latency_us is not None:
        parts.append(f"{result.latency_us} us")
    text, floor = " ".join(parts), scene.cluster.prove.nccl_floor
    if floor is not None and result.busbw_gb_s is not None and result.busbw_gb_s < floor:
        return (
            "warning",
            f"{text}, below prove.nccl_floor {floor:g} GB/s",
            f"are all HCAs of the link in hosts.{name}.fabric.hcas (a DGX Spark has two per port), "
            "the cable and the MTU right? Or lower prove.nccl_floor",
        )
    return "ok", text, ""


_CAUSES: dict[str, Callable[[_Scene, str], Cause | None]] = {
    "ray": _ray_cause,
    "c10d": _c10d_cause,
    "gloo": _gloo_cause,
    "queue": _queue_cause,
    "nccl": _nccl_cause,
}
