"""Rules over what the probes found on all hosts: what is wrong, and what to do about it. Pure.

A rule is a generator over the whole cluster; rules.yaml says how serious each is, why it matters,
and where that is known from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Interface

from cluster.environment import node_environment
from cluster.fabric import fabric_problem
from cluster.probe import Hca, Probe
from cluster.settings import Cluster
from cluster.tables import table

LOW_RENDEZVOUS_PORT = 100
"""The rendezvous of vLLM's second Ray executor, run as root: the first free one of 32 ports from
here on (seen in 0.26: tests/logs/serve-ray-cuda-0.26.log)."""
RDMA_MTU = 4200
CLOCK_SKEW_SECONDS = 5
FULL_DISK_BYTES = 2 * 10**9
LOW_DISK_BYTES = 30 * 10**9
DEFAULT_MEMORY_SHARE = 0.9
"""vLLM's own --gpu-memory-utilization."""


@dataclass(frozen=True)
class Finding:
    """Something preflight has found on a host."""

    id: str
    host: str
    found: str
    remedy: str

    @property
    def severity(self) -> str:
        """Error or warning."""
        return rules()[self.id]["severity"]

    @property
    def why(self) -> str:
        """Why it matters."""
        return rules()[self.id]["why"]

    @property
    def source(self) -> str:
        """Where that is known from."""
        return rules()[self.id]["source"]

    def to_json(self) -> dict[str, str]:
        """All of it, for machines."""
        return {
            **{"id": self.id, "severity": self.severity, "host": self.host, "found": self.found},
            **{"why": self.why, "remedy": self.remedy, "source": self.source},
        }


@dataclass(frozen=True)
class Situation:
    """A cluster file and what was found on its hosts."""

    cluster: Cluster
    probes: dict[str, Probe]
    """By host; one whose probe failed is not there."""
    failed: dict[str, str]
    """Why a probe failed, by host."""

    def environment(self, name: str) -> dict[str, str]:
        """The variables of a node's containers."""
        return {each.name: each.value for each in node_environment(self.cluster, name)}


Rule = Callable[[Situation], Iterator[Finding]]


def rules() -> dict[str, dict[str, str]]:
    """rules.yaml: severity, why and source, by rule id."""
    found: dict[str, dict[str, str]] = table("rules")
    return found


def judge(situation: Situation) -> list[Finding]:
    """Apply every rule; errors first, then by host in the order of the ranks."""
    order = {name: index for index, name in enumerate(situation.cluster.nodes)}
    found = [finding for rule in RULES for finding in rule(situation)]
    return sorted(found, key=lambda each: (order[each.host], each.severity, each.id))


def meeting_ports(cluster: Cluster, random_ports: list[int]) -> list[int]:
    """The TCP ports that every host has to reach on every other."""
    if cluster.executor == "ray":
        known = [cluster.ray.port, LOW_RENDEZVOUS_PORT]
    else:
        known = [cluster.serve.rendezvous_port]
    return [*known, cluster.serve.port, *random_ports]


def listening_ports(cluster: Cluster) -> dict[int, str]:
    """The ports that our processes on the head need, with the key that sets them."""
    if cluster.executor == "ray":
        return {cluster.ray.port: "ray.port", cluster.serve.port: "serve.port"}
    return {
        cluster.serve.rendezvous_port: "serve.rendezvous_port",
        cluster.serve.port: "serve.port",
    }


def _probe_failed(situation: Situation) -> Iterator[Finding]:
    for name, why in situation.failed.items():
        yield Finding(
            *("probe-failed", name, why),
            "the host needs Python 3, and an ssh user who is root or may use sudo: without a "
            "password, or give it to pyinfra with --same-sudo-password",
        )


def _fabric_address(situation: Situation) -> Iterator[Finding]:
    for name, probe in situation.probes.items():
        problem = fabric_problem(situation.cluster, name, probe.addresses)
        if problem:
            yield Finding("fabric-address", name, *problem)
            continue
        fabric = situation.cluster.hosts[name].fabric
        interface = probe.interface(fabric.interface)
        if interface is None:
            continue
        actual = next(
            IPv4Interface(each)
            for each in interface.addresses
            if each.partition("/")[0] == str(fabric.address.ip)
        )
        if actual.network != fabric.address.network:
            yield Finding(
                *("fabric-subnet", name),
                f"{fabric.interface} has {actual}, cluster.yaml says {fabric.address}",
                f"set hosts.{name}.fabric.address: {actual}, or correct the host's network",
            )
        if not interface.carrier:
            yield Finding(
                *("fabric-carrier", name, f"{fabric.interface} has no carrier"),
                f"plug the cable in, or: ip link set {fabric.interface} up",
            )


def _mtu(situation: Situation) -> Iterator[Finding]:
    sizes: dict[str, int] = {}
    for name, probe in situation.probes.items():
        host = situation.cluster.hosts[name]
        interface = probe.interface(host.fabric.interface)
        if interface is None or interface.mtu is None:
            continue
        sizes[name] = interface.mtu
        if host.fabric.hcas and interface.mtu < RDMA_MTU:
            yield Finding(
                *("rdma-mtu", name, f"{interface.name} has MTU {interface.mtu}"),
                f"set it to 9000 on every host, in netplan so that it stays: "
                f"ip link set {interface.name} mtu 9000 tries it",
            )
    largest = max(sizes.values(), default=0)
    for name, size in sizes.items():
        if size != largest:
            other = next(each for each, theirs in sizes.items() if theirs == largest)
            interface_name = situation.cluster.hosts[name].fabric.interface
            yield Finding(
                *("fabric-mtu", name, f"MTU {size} on {interface_name}, but {largest} on {other}"),
                f"ip link set {interface_name} mtu {largest} on {name}, and in netplan so that it "
                "stays",
            )
    if len(set(sizes.values())) > 1:
        return  # the large packet cannot pass; one finding is enough
    for name, probe in situation.probes.items():
        meeting = probe.meeting
        if meeting is None or name not in sizes:
            continue
        unreachable = {failure.peer for failure in meeting.failures}
        for peer, arrived in meeting.frames.items():
            if not arrived and peer in sizes and peer not in unreachable:
                yield Finding(
                    *("fabric-frame", name),
                    f"a packet of {sizes[name]} bytes does not arrive at {peer}",
                    "set the MTU of every switch port between them to at least that, or lower it "
                    "on both hosts",
                )


def _reach(situation: Situation) -> Iterator[Finding]:
    cluster = situation.cluster
    failed: dict[tuple[str, str], dict[int, str]] = {}
    for name, probe in situation.probes.items():
        for failure in probe.meeting.failures if probe.meeting else []:
            failed.setdefault((name, failure.peer), {})[failure.port] = failure.error
    for (name, peer), errors in failed.items():
        if peer not in situation.probes:
            continue  # its own finding says why
        link = f"{cluster.address(name)} to {cluster.address(peer)}"
        back = failed.get((peer, name), {})
        causes = ", ".join(sorted(set(errors.values())))
        ports = ", ".join(str(port) for port in sorted(errors))
        count = len(meeting_ports(cluster, [0, 0]))
        if len(errors) < count:
            yield Finding(
                *("fabric-firewall", name),
                f"from {link} ({peer}) some ports do not open: {ports} ({causes})",
                f"on {peer}, allow everything that comes in on {_interface(cluster, peer)}: "
                f"ufw allow in on {_interface(cluster, peer)}",
            )
        elif not back:
            yield Finding(
                *("fabric-firewall", name),
                f"no port opens from {link} ({peer}), but the other direction works ({causes})",
                f"a firewall blocks one direction: on {peer}, ufw allow in on "
                f"{_interface(cluster, peer)}; on {name}, allow outgoing traffic",
            )
        else:
            yield Finding(
                *("fabric-unreachable", name),
                f"no connection from {link} ({peer}) on {_interface(cluster, name)}: {causes}",
                f"check cable, switch and firewall between them: ping -I "
                f"{_interface(cluster, name)} {cluster.address(peer)}",
            )


def _interface(cluster: Cluster, name: str) -> str:
    return cluster.hosts[name].fabric.interface


def _gloo(situation: Situation) -> Iterator[Finding]:
    for name, probe in situation.probes.items():
        loopback = [each for each in probe.hostname_addresses if each.startswith("127.")]
        if loopback and "GLOO_SOCKET_IFNAME" not in situation.environment(name):
            yield Finding(
                *("gloo-hostname", name),
                f"GLOO_SOCKET_IFNAME is removed, and {probe.hostname} is {loopback[0]} in "
                "/etc/hosts",
                f"take GLOO_SOCKET_IFNAME: null out of env and hosts.{name}.env",
            )


def _ports(situation: Situation) -> Iterator[Finding]:
    head = situation.cluster.head
    probe = situation.probes.get(head)
    keys = listening_ports(situation.cluster)
    for listener in probe.listeners if probe else []:
        if listener.port in keys:
            yield Finding(
                *("port-taken", head),
                f"{listener.program} (pid {listener.pid}) listens on port {listener.port}",
                f"stop it, or set another {keys[listener.port]}",
            )


def _leftovers(situation: Situation) -> Iterator[Finding]:
    for name, probe in situation.probes.items():
        for container in probe.containers:
            if not container.ours:
                yield Finding(
                    *("container-name", name),
                    f"a container named {container.name} is here that this project did not start",
                    f"keep it under another name (docker rename {container.name} NAME), or remove "
                    f"it: docker rm --force {container.name}",
                )
        foreign = [container.name for container in probe.containers if not container.ours]
        if probe.processes and not foreign:
            first, more = probe.processes[0], len(probe.processes) - 1
            rest = f" and {more} more" if more else ""
            yield Finding(
                *("leftover-process", name),
                f"Ray or vLLM outside our containers: pid {first.pid} {first.command}{rest}",
                "stop it where it was started (ray stop, docker stop), or leave it if it is meant",
            )
        variables = situation.environment(name)
        is_ray = situation.cluster.executor == "ray"
        if is_ray and probe.auth_token and "RAY_AUTH_MODE" not in variables:
            yield Finding(
                *("ray-token", name, "/root/.ray/auth_token exists, RAY_AUTH_MODE is removed"),
                f"take RAY_AUTH_MODE: null out of env and hosts.{name}.env",
            )


def _docker(situation: Situation) -> Iterator[Finding]:
    for name, probe in situation.probes.items():
        if probe.docker.error:
            yield Finding(
                *("docker-down", name, f"Docker does not answer: {probe.docker.error}"),
                "systemctl enable --now docker; see: journalctl -u docker",
            )
            continue
        wants_gpus = situation.cluster.container.gpus is not None
        if wants_gpus and "nvidia" not in probe.docker.runtimes:
            runtimes = ", ".join(probe.docker.runtimes) or "none"
            yield Finding(
                *("gpu-runtime", name, f"Docker knows no NVIDIA runtime (it has {runtimes})"),
                "install nvidia-container-toolkit, then: nvidia-ctk runtime configure "
                "--runtime=docker && systemctl restart docker",
            )
        space = probe.docker_space
        if space and space.free_bytes < FULL_DISK_BYTES:
            yield Finding(
                *("disk-docker", name),
                f"{_gigabytes(space.free_bytes)} free at Docker's root {space.path}",
                "docker system df shows what takes it; docker image prune -a frees images",
            )
        elif space and space.free_bytes < LOW_DISK_BYTES and not probe.containers and wants_gpus:
            yield Finding(
                *("disk-docker-low", name),
                f"{_gigabytes(space.free_bytes)} free at Docker's root {space.path}",
                "docker system df shows what takes it",
            )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _gpus(situation: Situation) -> Iterator[Finding]:
    if situation.cluster.container.gpus is None:
        return
    for name, probe in situation.probes.items():
        declared = situation.cluster.hosts[name].gpus
        if len(probe.gpus) < declared:
            why = f" ({probe.gpu_error.splitlines()[-1]})" if probe.gpu_error else ""
            yield Finding(
                *("gpu-count", name),
                f"nvidia-smi lists {len(probe.gpus)} GPUs, cluster.yaml says {declared}{why}",
                f"set hosts.{name}.gpus: {len(probe.gpus)}"
                if probe.gpus
                else "install the NVIDIA driver; on a host without GPUs set container.gpus: null",
            )


def _model(situation: Situation) -> Iterator[Finding]:
    for name, probe in situation.probes.items():
        cluster = situation.cluster
        # The others get it from the head, and the head may get it from this machine.
        brought = cluster.model.relay if name != cluster.head else cluster.model_source == "rsync"
        if cluster.model_is_directory and not brought and probe.model and not probe.model.exists:
            yield Finding(
                *("model-missing", name, f"there is no {cluster.model.name}"),
                "copy the model there"
                if name == cluster.head
                else "set model.relay: true, or copy it there: every host reads its own part",
            )


def _rdma(situation: Situation) -> Iterator[Finding]:
    for name, probe in situation.probes.items():
        fabric = situation.cluster.hosts[name].fabric
        if not fabric.hcas:
            continue
        if not probe.infiniband_devices:
            yield Finding(
                *("infiniband-devices", name, "there is no /dev/infiniband/uverbs*"),
                "load ib_uverbs and install rdma-core; or set hcas: [] to run without RDMA",
            )
        container = situation.cluster.container
        if container.ulimits.get("memlock") != -1 and not container.privileged:
            yield Finding(
                *("memlock", name, "container.ulimits has no memlock: -1"),
                "add memlock: -1 to container.ulimits",
            )
        chosen: list[Hca] = []
        for wanted in fabric.hcas:
            device, _, port = wanted.partition(":")
            ports = [
                each
                for each in probe.hcas
                if each.name == device and (not port or each.port == int(port))
            ]
            if not ports:
                here = ", ".join(sorted({each.name for each in probe.hcas})) or "none"
                yield Finding(
                    *("hca-missing", name, f"no RDMA device {wanted}; this host has {here}"),
                    f"correct hosts.{name}.fabric.hcas",
                )
                continue
            chosen.append(ports[0])
            yield from _hca(name, wanted, ports[0], fabric.interface, probe)
        yield from _pinned_gid(situation, name, chosen)
        yield from _twins(name, chosen, probe)


def _hca(name: str, wanted: str, hca: Hca, interface: str, probe: Probe) -> Iterator[Finding]:
    if hca.state != "ACTIVE":
        yield Finding(
            *("hca-down", name, f"port {hca.port} of {wanted} is {hca.state or 'unknown'}"),
            "plug its cable in and bring its interface up "
            f"({', '.join(hca.interfaces) or 'none known'}); or take it out of hcas",
        )
        return
    if hca.interfaces and not any(same_port(interface, each) for each in hca.interfaces):
        yield Finding(
            *("hca-other-link", name),
            f"{wanted} belongs to {', '.join(hca.interfaces)}, the fabric is {interface}",
            f"name the devices of {interface}: "
            f"{', '.join(_hcas_of(interface, probe)) or 'it has none'}",
        )
    elif hca.link_layer == "Ethernet" and not hca.roce_v2:
        yield Finding(
            *("hca-gid", name, f"{wanted} has no RoCEv2 GID with an IPv4 address"),
            f"give {', '.join(hca.interfaces) or 'its interface'} an IPv4 address",
        )


def _hcas_of(interface: str, probe: Probe) -> list[str]:
    return [
        hca.name for hca in probe.hcas if any(same_port(interface, each) for each in hca.interfaces)
    ]


def same_port(one: str, other: str) -> bool:
    """Whether two interfaces are one, or the two halves of one port of a DGX Spark.

    Its ConnectX-7 hangs off two PCIe links, in PCI domains 0 and 2, so that one port shows as
    enp1s0f1np1 and enP2p1s0f1np1.
    """
    halves = {one.removeprefix("enP2p"), other.removeprefix("enP2p")}
    return one == other or (
        one.startswith("enP2p") != other.startswith("enP2p")
        and len({half.removeprefix("enp") for half in halves}) == 1
        and {half.startswith("enp") for half in halves} == {True, False}
        and "np" in one[3:]
    )


def _pinned_gid(situation: Situation, name: str, chosen: list[Hca]) -> Iterator[Finding]:
    value = situation.environment(name).get("NCCL_IB_GID_INDEX")
    if value is None:
        return
    remedy = f"take NCCL_IB_GID_INDEX out of env and hosts.{name}.env: NCCL finds it by itself"
    if not value.strip().lstrip("-").isdigit():
        yield Finding(
            "gid-pinned", name, f"NCCL_IB_GID_INDEX is {value!r}, which NCCL reads as 0", remedy
        )
        return
    for hca in chosen:
        if int(value) >= 0 and int(value) not in {gid.index for gid in hca.roce_v2}:
            right = ", ".join(str(gid.index) for gid in hca.roce_v2) or "none"
            yield Finding(
                *("gid-pinned", name),
                f"NCCL_IB_GID_INDEX is {value}, but on {hca.name} the RoCEv2 IPv4 index is {right}",
                remedy,
            )


def _twins(name: str, chosen: list[Hca], probe: Probe) -> Iterator[Finding]:
    owners: dict[str, str] = {}
    for interface_name in sorted({each for hca in chosen for each in hca.interfaces}):
        interface = probe.interface(interface_name)
        for address in interface.addresses if interface else []:
            subnet = str(IPv4Interface(address).network)
            if subnet in owners:
                yield Finding(
                    *("twins-one-subnet", name),
                    f"{owners[subnet]} and {interface_name} are both in {subnet}",
                    f"give {interface_name} an address in a subnet of its own, on every host",
                )
            owners.setdefault(subnet, interface_name)


def _clock(situation: Situation) -> Iterator[Finding]:
    head = situation.probes.get(situation.cluster.head)
    for name, probe in situation.probes.items():
        skew = probe.time - head.time if head else 0
        if abs(skew) > CLOCK_SKEW_SECONDS:
            direction = "ahead of" if skew > 0 else "behind"
            yield Finding(
                *("clock-skew", name),
                f"its clock is {abs(skew):.0f} s {direction} {situation.cluster.head}'s",
                "timedatectl set-ntp true; a host without internet takes the head as its server",
            )


def _memory(situation: Situation) -> Iterator[Finding]:
    share = situation.cluster.serve.gpu_memory_utilization or DEFAULT_MEMORY_SHARE
    for name, probe in situation.probes.items():
        is_ours = any(each.ours and each.running for each in probe.containers)
        if not probe.is_unified_memory or is_ours or "MemTotal" not in probe.memory:
            continue
        needed = share * probe.memory["MemTotal"]
        available, free = probe.memory.get("MemAvailable", 0), probe.memory.get("MemFree", 0)
        wants = f"gpu_memory_utilization {share} asks for {_gigabytes(needed)}"
        if available < needed:
            fits = int(available / probe.memory["MemTotal"] * 100) / 100
            yield Finding(
                *("memory-short", name, f"{wants}, but {_gigabytes(available)} are available"),
                f"stop what takes the memory, or set serve.gpu_memory_utilization: {fits} or less",
            )
        elif free < needed:
            cached = probe.memory.get("Cached", 0)
            yield Finding(
                *("memory-cached", name),
                f"{wants}; {_gigabytes(free)} are free, {_gigabytes(cached)} are page cache",
                "drop it before vLLM starts: sync; echo 1 > /proc/sys/vm/drop_caches",
            )


def _known_bad(situation: Situation) -> Iterator[Finding]:
    known_bad: dict[str, list[dict[str, str]]] = table("known_bad")
    for name, probe in situation.probes.items():
        versions = [("kernels", "kernel", probe.kernel or "")]
        versions += [("drivers", "NVIDIA driver", gpu.driver) for gpu in probe.gpus[:1]]
        machine = " ".join([probe.product or "", *(gpu.name for gpu in probe.gpus)])
        is_spark = "DGX Spark" in machine or "GB10" in machine
        for key, label, version in versions:
            for row in known_bad[key]:
                if re.search(row["match"], version) and (is_spark or not row["product"]):
                    found = f"{label} {version}: {row['what']} ({row['source']})"
                    yield Finding("known-bad", name, found, row["remedy"])


RULES: tuple[Rule, ...] = (
    *(_probe_failed, _fabric_address, _mtu, _reach, _gloo, _ports, _leftovers, _docker, _gpus),
    *(_model, _rdma, _clock, _memory, _known_bad),
)
