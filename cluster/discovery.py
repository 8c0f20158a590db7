"""Which network between some hosts should be their fabric, and why that one. Pure.

RDMA first, then speed. Never Wi-Fi, bridges or VPNs: they reach the other hosts just as well, which
is why every layer that guesses takes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import IPv4Interface, IPv4Network
from itertools import combinations
from typing import Any

from cluster.findings import RDMA_MTU, same_port
from cluster.probe import Hca, Interface, Meeting, Probe

PORTS_TRIED = 2
"""Random ports that the hosts try on each network."""
MEETING_SECONDS = 4
"""How long they try."""
MAX_NETWORKS = 32
MAX_OTHERS = 8
"""Interfaces that a host's comment says no to, one by one."""

_CABLES = {"physical", "bond", "vlan"}
_NEVER = {
    "loopback": "loopback",
    "wireless": "Wi-Fi",
    "bridge": "a bridge",
    "vpn": "a VPN",
}
_INNER = re.compile(
    r"docker|br-|virbr|cni|flannel|cali|cilium|vxlan|veth|kube|podman|lxc|lxd|incus|vmnet|vnet"
    r"|dummy|ovs|tap|tun|wg|tailscale|zt"
)
"""Networks inside a host, or over others, by the names that their programs give them."""


class NoFabricError(ValueError):
    """No network joins all hosts. `lines` say which reached which, and what to do."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


@dataclass(frozen=True)
class Place:
    """An address of a host that could be its place on the fabric."""

    host: str
    interface: Interface
    address: IPv4Interface
    hcas: tuple[Hca, ...]
    """RDMA devices of its port with an active link; the interface's own first."""
    is_default_route: bool

    @property
    def rank(self) -> tuple[Any, ...]:
        """Larger is better."""
        return (
            bool(self.hcas),
            self.interface.kind in _CABLES,
            self.interface.speed_mbps or 0,
            not self.is_default_route,
        )

    def __str__(self) -> str:
        return f"{self.interface.name} {self.address}"


@dataclass(frozen=True)
class Proposal:
    """What cluster.yaml should say of a host, and why. None: nothing, the default is right."""

    address: IPv4Interface
    interface: str
    hcas: list[str] | None
    gpus: int | None
    why: list[str]
    """Why this address and interface, and what else there was."""
    why_hcas: list[str]
    why_gpus: str
    warnings: list[str]


@dataclass(frozen=True)
class Landscape:
    """What the probes saw: every host's places, by network."""

    probes: dict[str, Probe]
    current: dict[str, str] = field(default_factory=dict)
    """The fabric addresses of an existing cluster.yaml; they win where nothing is better."""

    @cached_property
    def places(self) -> dict[str, list[Place]]:
        """The places of each host, best first."""
        return {host: _places(host, probe) for host, probe in self.probes.items()}

    @cached_property
    def refused(self) -> dict[str, dict[str, str]]:
        """Why an interface is no candidate, by host and name."""
        return {host: dict(_refused(probe)) for host, probe in self.probes.items()}

    @cached_property
    def networks(self) -> dict[IPv4Network, dict[str, Place]]:
        """The networks that two or more hosts share, best first, with each host's place on it."""
        found: dict[IPv4Network, dict[str, Place]] = {}
        for host, places in self.places.items():
            for place in places:
                found.setdefault(place.address.network, {}).setdefault(host, place)
        shared = {
            network: members
            for network, members in found.items()
            if len(members) >= min(2, len(self.probes)) and not _same_address(members)
        }
        order = sorted(shared, key=lambda each: self._rank(shared[each]), reverse=True)
        return {network: shared[network] for network in order[:MAX_NETWORKS]}

    def _rank(self, members: dict[str, Place]) -> tuple[Any, ...]:
        """Larger is better: a network is as good as its worst place."""
        ranks = [place.rank for place in members.values()]
        worst = tuple(min(parts) for parts in zip(*ranks, strict=True))
        is_current = all(
            self.current.get(host) == str(place.address.ip) for host, place in members.items()
        )
        # Of two that are equal, the shorter name: enp1s0f1np1 before its half enP2p1s0f1np1.
        name = min((len(each.interface.name), each.interface.name) for each in members.values())
        backwards = tuple(-ord(character) for character in name[1])
        return (len(members), *worst, is_current, -name[0], backwards)

    def meetings(self, host: str, ports: list[int]) -> dict[str, dict[str, Any]]:
        """What a host should try: the `meetings` of remote/probe.py. `ports`: TCP's, then UDP's."""
        return {
            str(network): {
                "address": str(members[host].address.ip),
                "peers": {
                    name: str(place.address.ip) for name, place in members.items() if name != host
                },
                "ports": ports[:PORTS_TRIED],
                "udp": ports[PORTS_TRIED],
                "deadline": MEETING_SECONDS,
                "frame": members[host].interface.mtu,
            }
            for network, members in self.networks.items()
            if host in members and len(members) > 1
        }


Meetings = dict[str, dict[str, Meeting]]
"""What came of them, by host and network."""


def _same_address(members: dict[str, Place]) -> str | None:
    """Two hosts of a network that have the same address."""
    for one, other in combinations(members.values(), 2):
        if one.address.ip == other.address.ip:
            return f"{one.host} and {other.host} both have {one.address.ip}"
    return None


def _places(host: str, probe: Probe) -> list[Place]:
    refused = dict(_refused(probe))
    found = []
    for interface in probe.interfaces:
        if interface.name in refused:
            continue
        hcas = tuple(hca for hca in _hcas(interface, probe) if hca.state == "ACTIVE")
        is_default = interface.name in probe.default_routes
        for address in interface.addresses:
            parsed = _address(address)
            if parsed is not None:
                found.append(Place(host, interface, parsed, hcas, is_default))
    found.sort(key=lambda place: (len(place.interface.name), place.interface.name))
    return sorted(found, key=lambda place: place.rank, reverse=True)


def _address(text: str) -> IPv4Interface | None:
    try:
        address = IPv4Interface(text)
    except ValueError:
        return None
    return address if address.network.prefixlen < 32 and not address.ip.is_link_local else None


def _refused(probe: Probe) -> Iterator[tuple[str, str]]:
    for interface in probe.interfaces:
        if interface.kind in _NEVER:
            yield interface.name, _NEVER[interface.kind]
        elif _INNER.match(interface.name):
            yield interface.name, "a network inside the host"
        elif not interface.carrier:
            yield interface.name, "no carrier"
        elif not interface.addresses:
            yield interface.name, "no IPv4 address"
        elif not any(map(_address, interface.addresses)):
            yield interface.name, f"{interface.addresses[0]} is not an address in a fixed subnet"


def is_twin(one: Interface, other: Interface, probe: Probe) -> bool:
    """Whether two interfaces are the halves of one port of a DGX Spark.

    Known by their names, or where someone has renamed them by their place on the bus: the same
    function in PCI domains 0 and 2 (eugr/spark-vllm-docker, NETWORKING.md).
    """
    if one.name == other.name:
        return False
    if same_port(one.name, other.name):
        return True
    machine = " ".join([probe.product or "", *(gpu.name for gpu in probe.gpus)])
    if not re.search(r"DGX.Spark|GB10", machine) or one.driver != "mlx5_core":
        return False
    halves = [(each.device or "").partition(":") for each in (one, other)]
    return {half[0] for half in halves} == {"0000", "0002"} and halves[0][2] == halves[1][2]


def _twin(interface: Interface, probe: Probe) -> Interface | None:
    if interface.kind != "physical":
        return None
    return next((each for each in probe.interfaces if is_twin(interface, each, probe)), None)


def _hcas(interface: Interface, probe: Probe) -> list[Hca]:
    """The RDMA devices of an interface's port: its own first."""
    twin = _twin(interface, probe)
    own = [hca for hca in probe.hcas if interface.name in hca.interfaces]
    return own + [hca for hca in probe.hcas if twin and twin.name in hca.interfaces]


def _hca_names(place: Place, probe: Probe) -> list[str]:
    names = [hca.name for hca in probe.hcas]
    return [
        f"{hca.name}:{hca.port}" if names.count(hca.name) > 1 else hca.name for hca in place.hcas
    ]


def unreached(
    network: IPv4Network, members: dict[str, Place], one: str, other: str, meetings: Meetings
) -> str | None:
    """Why `one` could not connect to `other` on a network; None where it could."""
    if one not in members or other not in members:
        return f"{other if one in members else one} has no address there"
    meeting = meetings.get(one, {}).get(str(network))
    if meeting is None:
        return f"{one} did not try"
    errors = [each.error for each in meeting.failures if each.peer == other]
    return None if len(errors) < PORTS_TRIED else ", ".join(sorted(set(errors)))


def _joins(
    landscape: Landscape, network: IPv4Network, hosts: list[str], meetings: Meetings
) -> str | None:
    """Why a network does not join all `hosts` in both directions; None where it does."""
    members = landscape.networks[network]
    absent = [host for host in hosts if host not in members]
    if absent:
        return f"{', '.join(absent)} {'has' if len(absent) == 1 else 'have'} no address there"
    for one, other in combinations(hosts, 2):
        for source, target in ((one, other), (other, one)):
            error = unreached(network, members, source, target, meetings)
            if error:
                return f"{source} does not reach {target} there ({error})"
    return None


def propose(landscape: Landscape, meetings: Meetings) -> dict[str, Proposal]:
    """Choose the fabric and say why, for every host. Raises NoFabricError."""
    hosts = list(landscape.probes)
    verdicts = {
        network: _joins(landscape, network, hosts, meetings) for network in landscape.networks
    }
    chosen = next((network for network, why in verdicts.items() if why is None), None)
    if chosen is None:
        raise NoFabricError(list(_no_fabric(landscape, meetings)))
    members = landscape.networks[chosen]
    return {host: _proposal(landscape, members[host], chosen, verdicts, meetings) for host in hosts}


def _proposal(
    landscape: Landscape,
    place: Place,
    chosen: IPv4Network,
    verdicts: dict[IPv4Network, str | None],
    meetings: Meetings,
) -> Proposal:
    probe, members = landscape.probes[place.host], landscape.networks[chosen]
    twin = _twin(place.interface, probe)
    names: list[str] | None = _hca_names(place, probe)
    why_hcas = list(_why_hcas(place, members, twin))
    if not names:
        active = [hca.name for hca in probe.hcas if hca.state == "ACTIVE"]
        names = [] if active else None
        if active:
            why_hcas = [
                f"No RDMA on {place.interface.name}. Without this line NCCL would take "
                f"{', '.join(active)}, which are on another network."
            ]
            why_hcas += _ring(landscape, meetings)
    rdma = "RDMA" if place.hcas else "no RDMA"
    why = [f"{place.interface.name}: {rdma}, {_described(place)}; {_tried(place, members)}."]
    why += _others(landscape, place, twin, verdicts)
    gpus = len(probe.gpus)
    if gpus:
        why_gpus = ", ".join(sorted({gpu.name for gpu in probe.gpus}))
    else:
        complaint = (probe.gpu_error or "it lists none").splitlines()[-1]
        why_gpus = (
            f"nvidia-smi shows no GPU here ({complaint}); gpus stays 1, and a host without NVIDIA "
            "GPUs needs container: {gpus: null}"
        )
    return Proposal(
        place.address,
        place.interface.name,
        names,
        gpus or None,
        why,
        why_hcas,
        why_gpus,
        list(_warnings(landscape, place, twin, verdicts, meetings)),
    )


def _described(place: Place) -> str:
    parts = []
    if place.interface.kind not in _CABLES:
        parts.append("a virtual interface")
    elif place.interface.speed_mbps:
        parts.append(f"{place.interface.speed_mbps / 1000:g} Gb/s")
    parts.append(f"MTU {place.interface.mtu}")
    if place.is_default_route:
        parts.append("the default route")
    return ", ".join(parts)


def _tried(place: Place, members: dict[str, Place]) -> str:
    others = [host for host in members if host != place.host]
    if not others:
        return "a host alone reaches nobody, so nothing was tried"
    return f"tried with {', '.join(others)} in both directions"


def _others(
    landscape: Landscape,
    place: Place,
    twin: Interface | None,
    verdicts: dict[IPv4Network, str | None],
) -> Iterator[str]:
    """One line for each port with an address that was not taken."""
    probe = landscape.probes[place.host]
    lines, seen = [], {place.interface.name, "lo"}
    for other in landscape.places[place.host]:
        other_twin = _twin(other.interface, probe)
        is_told = other_twin is not None and other_twin.name in seen - {place.interface.name}
        if other.interface.name in seen or is_told:
            continue
        seen.add(other.interface.name)
        if twin is not None and other.interface.name == twin.name:
            lines.append(
                f"{other} is the other half of the same port: RDMA uses it, addresses do not."
            )
            continue
        network = other.address.network
        if network == place.address.network:
            why = f"in the same subnet as {place.interface.name}"
        elif network in verdicts:
            why = verdicts[network] or _worse(other, place)
        else:
            why = _alone(landscape, other)
        lines.append(f"Not {other}: {why}.")
    for name, why in landscape.refused[place.host].items():
        interface = probe.interface(name)
        if twin is not None and twin.name == name:
            continue  # a warning says it
        is_cable = interface is not None and interface.kind in _CABLES and interface.carrier
        if name not in seen and interface is not None and (interface.addresses or is_cable):
            lines.append(f"Not {' '.join([name, *interface.addresses[:1]])}: {why}.")
    yield from lines[:MAX_OTHERS]
    if len(lines) > MAX_OTHERS:
        yield f"Nor {len(lines) - MAX_OTHERS} more."


def _alone(landscape: Landscape, place: Place) -> str:
    """Why a network is not among those that hosts share."""
    network = place.address.network
    members = {
        each.host: each
        for places in landscape.places.values()
        for each in reversed(places)
        if each.address.network == network
    }
    return _same_address(members) or f"no other host has an address in {network}"


def _worse(place: Place, chosen: Place) -> str:
    if chosen.hcas and not place.hcas:
        return f"it joins the hosts too, but without RDMA: {_described(place)}"
    if place.interface.kind not in _CABLES and chosen.interface.kind in _CABLES:
        return "it joins the hosts too, but is a virtual interface"
    if (place.interface.speed_mbps or 0) < (chosen.interface.speed_mbps or 0):
        return f"it joins the hosts too, but is slower: {_described(place)}"
    if place.is_default_route and not chosen.is_default_route:
        return "it joins the hosts too, but carries the default route"
    if place.hcas:
        devices = ", ".join(hca.name for hca in place.hcas)
        return f"as good; add its {devices} to hcas to use this cable, too"
    return f"it joins the hosts too, but is no better: {_described(place)}"


def _why_hcas(place: Place, members: dict[str, Place], twin: Interface | None) -> Iterator[str]:
    if not place.hcas:
        return
    if twin is not None and len(place.hcas) > 1:
        yield "The two RDMA devices of this port: each carries half of what the cable can."
    indexes = {
        (each.host, hca.name): hca.roce_v2[0].index
        for each in members.values()
        for hca in each.hcas
        if hca.roce_v2
    }
    if len(set(indexes.values())) > 1:
        listed = ", ".join(f"{index} on {host} {hca}" for (host, hca), index in indexes.items())
        yield (
            f"The RoCEv2 GID of the IPv4 address has index {listed}: leave NCCL_IB_GID_INDEX "
            "unset, NCCL finds it."
        )


def _warnings(
    landscape: Landscape,
    place: Place,
    twin: Interface | None,
    verdicts: dict[IPv4Network, str | None],
    meetings: Meetings,
) -> Iterator[str]:
    chosen = place.address.network
    probe, members = landscape.probes[place.host], landscape.networks[chosen]
    interface = place.interface
    sizes = {host: each.interface.mtu or 0 for host, each in members.items()}
    largest = max(sizes.values())
    small = [host for host, size in sizes.items() if size < largest]
    if place.host in small:
        yield (
            f"{interface.name} has MTU {interface.mtu}, the largest is {largest}: large packets "
            f"vanish. Set mtu {largest} here, in netplan so that it stays."
        )
    elif not small:
        meeting = meetings.get(place.host, {}).get(str(chosen))
        lost = [peer for peer, passed in (meeting.frames if meeting else {}).items() if not passed]
        if lost:
            yield (
                f"A packet of {interface.mtu} bytes does not arrive at {', '.join(lost)}: raise "
                "the MTU of the switch ports between, or lower it on all hosts."
            )
    if place.hcas and 0 < largest < RDMA_MTU:
        yield f"MTU {largest} makes RDMA use small packets: set 9000 on every host, in netplan."
    for hca in _hcas(interface, probe):
        if hca.state != "ACTIVE":
            yield (
                f"{hca.name} of the same port ({', '.join(hca.interfaces)}) is "
                f"{hca.state or 'in an unknown state'} and left out: a half of the port is "
                "missing. Bring it up and discover again."
            )
    if any(each.hcas for each in members.values()) and not place.hcas:
        others = ", ".join(host for host, each in members.items() if each.hcas)
        yield f"{others} have RDMA on this network, this host has not: NCCL will use TCP."
    if twin is not None and any(twin.name in hca.interfaces for hca in place.hcas):
        yield from _twin_warnings(place, twin, verdicts)
    for hca in place.hcas:
        own = interface.name in hca.interfaces
        if own and hca.link_layer == "Ethernet" and not hca.roce_v2:
            yield f"{hca.name} has no RoCEv2 GID with an IPv4 address: NCCL cannot use it."


def _twin_warnings(
    place: Place, twin: Interface, verdicts: dict[IPv4Network, str | None]
) -> Iterator[str]:
    label = f"{twin.name}, the other half of this port,"
    if not twin.addresses:
        yield (
            f"{label} has no IPv4 address, so its RDMA device cannot be used: give it one in "
            "another subnet, on every host."
        )
    for address in filter(None, map(_address, twin.addresses)):
        network = address.network
        if network == place.address.network:
            yield (
                f"{label} is in the same subnet ({address}), so that all traffic takes one half: "
                "give it an address in another subnet, on every host."
            )
        elif why := verdicts.get(network, "no other host has an address there"):
            yield (
                f"{label} does not join all hosts ({network}: {why}). Until it does, RDMA on "
                f"{', '.join(_devices(place, twin))} fails: correct it, or take it out of hcas."
            )


def _devices(place: Place, interface: Interface) -> list[str]:
    return [hca.name for hca in place.hcas if interface.name in hca.interfaces]


def _pairs(landscape: Landscape) -> Iterator[tuple[str, str]]:
    yield from combinations(landscape.probes, 2)


def _links(
    landscape: Landscape, one: str, other: str, meetings: Meetings
) -> list[tuple[IPv4Network, str | None, str | None]]:
    """The networks of a pair: why not there, why not back."""
    return [
        (
            network,
            unreached(network, members, one, other, meetings),
            unreached(network, members, other, one, meetings),
        )
        for network, members in landscape.networks.items()
        if one in members and other in members
    ]


def _ring(landscape: Landscape, meetings: Meetings) -> list[str]:
    """What to say where every pair of hosts has an RDMA cable, but no subnet is everyone's."""
    cabled: dict[str, list[str]] = {host: [] for host in landscape.probes}
    for one, other in _pairs(landscape):
        links = [
            landscape.networks[network]
            for network, there, back in _links(landscape, one, other, meetings)
            if there is None and back is None
        ]
        rdma = [members for members in links if members[one].hcas and members[other].hcas]
        if not rdma:
            return []
        for members in rdma:
            for host in (one, other):
                for name in _hca_names(members[host], landscape.probes[host]):
                    if name not in cabled[host]:
                        cabled[host].append(name)
    if len(cabled) < 3:
        return []
    listed = "; ".join(f"{host} [{', '.join(names)}]" for host, names in cabled.items())
    return [
        "The hosts form a ring: each pair has a cable and subnets of its own. NCCL uses such a "
        f"ring with hcas {listed} and env NCCL_IB_SUBNET_AWARE_ROUTING: 1, NCCL_NET_PLUGIN: none "
        "(NVIDIA/dgx-spark-playbooks, nccl/launch.sh)."
    ]


def _no_fabric(landscape: Landscape, meetings: Meetings) -> Iterator[str]:
    hosts = list(landscape.probes)
    if len(hosts) > 1:
        yield f"No network joins {', '.join(hosts)} in both directions:"
    bare = [host for host in hosts if not landscape.places[host]]
    for host in bare:
        refused = _listed(f"{name} ({why})" for name, why in landscape.refused[host].items())
        yield f"  {host} has no usable address at all; its interfaces: {refused}"
        error = landscape.probes[host].ip_error
        if error:
            yield f"  {host} cannot list its addresses: {error}. Install iproute2 there."
    has_one_way = False
    for one, other in _pairs(landscape):
        if one in bare or other in bare:
            continue
        links = _links(landscape, one, other, meetings)
        if not links:
            yield f"  {one} and {other} share no subnet. {_have(landscape, one, other)}"
        for network, there, back in links:
            members = landscape.networks[network]
            route = f"  {one} {members[one]}, {other} {members[other]}"
            if there is None and back is None:
                yield f"{route}: both directions work"
            elif there and back:
                yield f"{route}: neither direction works ({there}; back: {back})"
            else:
                has_one_way = True
                source, target = (one, other) if there else (other, one)
                yield f"{route}: {source} does not reach {target} ({there or back}), but back works"
    yield from _remedies(landscape, meetings, bare, has_one_way)


def _have(landscape: Landscape, one: str, other: str) -> str:
    """The addresses of two hosts that share no subnet, and what that looks like."""
    mine, theirs = landscape.places[one], landscape.places[other]
    text = "; ".join(
        f"{host}: {_listed(map(str, places))}" for host, places in ((one, mine), (other, theirs))
    )
    for first in mine:
        for second in theirs:
            if first.address.ip == second.address.ip:
                return f"{text} (both have {first.address.ip}: each needs its own)"
            if first.address.network.overlaps(second.address.network):
                return f"{text} (the prefix lengths of {first} and {second} differ)"
    return text


def _listed(parts: Iterable[str]) -> str:
    found = list(parts)
    more = [f"and {len(found) - MAX_OTHERS} more"] if len(found) > MAX_OTHERS else []
    return ", ".join(found[:MAX_OTHERS] + more) or "none"


def _remedies(
    landscape: Landscape, meetings: Meetings, bare: list[str], has_one_way: bool
) -> Iterator[str]:
    ring = _ring(landscape, meetings)
    if ring:
        yield (
            "This is a ring: every pair has a cable of its own. cluster.yaml needs one subnet for "
            "all hosts, such as the 10 GbE office network; give every host an address on it and "
            "discover again, or use a switch."
        )
        yield from ring
    elif has_one_way:
        yield (
            "A firewall blocks one direction: allow everything that comes in on the fabric's "
            "interface (ufw allow in on INTERFACE), then discover again."
        )
    else:
        where = f"on {', '.join(bare)}, " if bare else ""
        yield (
            f"What to do: {where}give both ends of the fast cable fixed addresses in one subnet "
            "(netplan: 192.168.200.12/24 and 192.168.200.13/24), see that the link is up (ip -br "
            "link) and that no firewall is on it, then discover again."
        )
