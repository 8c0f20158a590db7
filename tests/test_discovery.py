"""tasks/discover.py: what it proposes for every kind of cabling, what it says, what it writes."""

from __future__ import annotations

import json
import logging
import re
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pyinfra
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyinfra.connectors.fake import FakeConnector
from pyinfra.connectors.util import CommandOutput, OutputLine
from pyinfra.context import ctx_inventory, ctx_state
from pyinfra_cli.main import cli

from cluster import hosts_section
from cluster.discovery import Landscape, Meetings, NoFabricError, Proposal, propose
from cluster.hosts_section import EditError, Entry, edited
from cluster.load import load
from cluster.operations import discover as operations
from cluster.probe import Failure, Interface, Meeting, Probe
from cluster.settings import Cluster, problems
from tests import trees
from tests.conftest import ROOT
from tests.trees import OTHER_SUBNETS, PORT_1, PORT_1_TWIN, TWO_SUBNETS, Nic, Node, spark

MINIMAL = {"image": "vllm/vllm-openai:v0.17.1", "model": "m"}
Blocked = frozenset[tuple[str, str, str]]
"""Network, source, target: what a firewall or a missing cable does not let through."""


@pytest.fixture(scope="module")
def answer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Node], dict[str, Any]]:
    """What the probe prints on a host; each is built and probed once."""
    known: dict[Node, dict[str, Any]] = {}

    def answer(node: Node) -> dict[str, Any]:
        if node not in known:
            root = trees.build_node(tmp_path_factory.mktemp("tree") / "host", node)
            known[node] = trees.read_tree(root)
            trees.remove(root)
        return known[node]

    return answer


@pytest.fixture
def probe_of(answer_of: Callable[[Node], dict[str, Any]]) -> Callable[[Node], Probe]:
    """The same as preflight and discover see it."""
    return lambda node: Probe.model_validate(answer_of(node))


def meet(landscape: Landscape, blocked: Blocked = frozenset()) -> Meetings:
    """What the hosts would say after they have met."""
    found: Meetings = {}
    for host in landscape.probes:
        found[host] = {}
        for network, wanted in landscape.meetings(host, [40001, 40002, 40003]).items():
            members = landscape.networks[IPv4Network(network)]
            found[host][network] = Meeting(
                failures=[
                    Failure(peer=peer, port=port, error="no answer")
                    for peer in wanted["peers"]
                    for port in wanted["ports"]
                    if (network, host, peer) in blocked
                ],
                frames={
                    peer: (members[peer].interface.mtu or 0) >= wanted["frame"]
                    for peer in wanted["peers"]
                },
            )
    return found


@dataclass
class Discovered:
    """What was proposed, as text and values."""

    proposals: dict[str, Proposal]
    text: str

    @property
    def cluster(self) -> Cluster:
        return Cluster.model_validate({**MINIMAL, **yaml.safe_load(self.text)})

    def said(self, host: str) -> str:
        """All comments of a host, on one line."""
        each = self.proposals[host]
        return " ".join([*each.why, *each.why_hcas, each.why_gpus])

    def warned(self, host: str) -> str:
        return " ".join(self.proposals[host].warnings)


Discover = Callable[..., Discovered]


@pytest.fixture
def discover(probe_of: Callable[[Node], Probe]) -> Discover:
    def call(
        nodes: dict[str, Node],
        blocked: Blocked = frozenset(),
        current: dict[str, str] | None = None,
        **changes: Any,
    ) -> Discovered:
        probes = {name: probe_of(node).model_copy(update=changes) for name, node in nodes.items()}
        landscape = Landscape(probes, current or {})
        proposals = propose(landscape, meet(landscape, blocked))
        entries = [Entry(name, proposal) for name, proposal in proposals.items()]
        return Discovered(proposals, hosts_section.section(entries))

    return call


def refusal(discover: Discover, *arguments: Any, **options: Any) -> str:
    with pytest.raises(NoFabricError) as caught:
        discover(*arguments, **options)
    return "\n".join(caught.value.lines)


BOTH = ["rocep1s0f1", "roceP2p1s0f1"]
# What each scenario has to end in: interface, first address, HCAs, and a warning per host.
EXPECTED: dict[str, tuple[str, str, list[str] | None]] = {
    "direct": (PORT_1, "192.168.200.12/24", BOTH),
    "dual_cable": ("enp1s0f0np0", "192.168.210.12/24", ["rocep1s0f0", "roceP2p1s0f0"]),
    "switch": (PORT_1, "192.168.200.12/24", BOTH),
    "ring": ("enP7s7", "10.1.230.180/24", []),
    "half_up": (PORT_1, "192.168.200.12/24", BOTH),
    "gid_drift": (PORT_1, "192.168.200.12/24", BOTH),
    "mtu_reset": (PORT_1, "192.168.200.12/24", BOTH),
    "twins_one_subnet": (PORT_1, "192.168.200.12/24", BOTH),
    "twin_without_address": (PORT_1, "192.168.200.12/24", BOTH),
    "no_roce": ("ens2f0", "192.168.200.12/24", None),
    "no_default_route": (PORT_1, "192.168.200.12/24", BOTH),
    "worker_without_office": (PORT_1, "192.168.200.12/24", BOTH),
}
CLEAN = {"direct", "dual_cable", "switch", "ring", "gid_drift", "no_roce"}
CLEAN |= {"no_default_route", "worker_without_office"}


@pytest.mark.parametrize("scenario", trees.SCENARIOS)
def test_what_is_proposed(scenario: str, discover: Discover) -> None:
    nodes = trees.SCENARIOS[scenario]()
    found = discover(nodes)
    cluster = found.cluster
    assert list(problems(cluster)) == []
    assert list(cluster.hosts) == cluster.nodes == list(nodes)
    interface, address, hcas = EXPECTED[scenario]
    head = cluster.hosts[cluster.head]
    assert (head.fabric.interface, str(head.fabric.address)) == (interface, address)
    assert head.fabric.hcas == hcas
    assert {host.gpus for host in cluster.hosts.values()} == {8 if scenario == "no_roce" else 1}
    warnings = {name: each.warnings for name, each in found.proposals.items() if each.warnings}
    assert (warnings == {}) == (scenario in CLEAN), warnings
    assert max(map(len, found.text.splitlines())) <= 100


def test_every_other_interface_is_told(discover: Discover) -> None:
    found = discover(trees.direct())
    assert found.said("spark-1") == (
        "enp1s0f1np1: RDMA, 100 Gb/s, MTU 9000; tried with spark-2 in both directions. "
        "enP2p1s0f1np1 192.168.201.12/24 is the other half of the same port: RDMA uses it, "
        "addresses do not. "
        "Not enP7s7 10.1.230.180/24: it joins the hosts too, but without RDMA: 10 Gb/s, MTU 1500, "
        "the default route. "
        "Not docker0 172.17.0.1/16: a bridge. "
        "Not wlP9s9 10.7.0.1/16: Wi-Fi. "
        "The two RDMA devices of this port: each carries half of what the cable can. "
        "NVIDIA GB10"
    )


def test_the_second_cable_is_offered(discover: Discover) -> None:
    said = discover(trees.dual_cable()).said("spark-2")
    assert "Not enp1s0f1np1 192.168.200.13/24: as good; add its rocep1s0f1, roceP2p1s0f1" in said


def test_the_choice_of_the_file_stays_where_nothing_is_better(discover: Discover) -> None:
    current = {"spark-1": "192.168.200.12", "spark-2": "192.168.200.13"}
    found = discover(trees.dual_cable(), current=current)
    assert found.proposals["spark-1"].interface == PORT_1
    office = {"spark-1": "10.1.230.180", "spark-2": "10.1.230.181"}
    found = discover(trees.dual_cable(), current=office)
    assert found.proposals["spark-1"].interface == "enp1s0f0np0"


def test_a_cable_from_port_1_to_port_0(discover: Discover) -> None:
    nodes = {"spark-1": spark(1, {1: TWO_SUBNETS}), "spark-2": spark(2, {0: TWO_SUBNETS})}
    hosts = discover(nodes).cluster.hosts
    assert hosts["spark-1"].fabric.hcas == BOTH
    assert hosts["spark-2"].fabric.interface == "enp1s0f0np0"
    assert hosts["spark-2"].fabric.hcas == ["rocep1s0f0", "roceP2p1s0f0"]


def test_a_half_that_is_down_is_left_out_and_told_on_both_sides(discover: Discover) -> None:
    found = discover(trees.half_up())
    assert found.proposals["spark-2"].hcas == ["rocep1s0f1"]
    assert "roceP2p1s0f1 of the same port (enP2p1s0f1np1) is DOWN" in found.warned("spark-2")
    assert "enP2p1s0f1np1, the other half of this port, does not join all" in found.warned(
        "spark-1"
    )


def test_an_rdma_port_that_is_down_under_a_link_that_is_up(discover: Discover) -> None:
    nodes = trees.direct()
    nodes["spark-2"] = nodes["spark-2"].change(PORT_1, hca_up=False)
    found = discover(nodes)
    assert found.proposals["spark-2"].hcas == ["roceP2p1s0f1"]
    assert "rocep1s0f1 of the same port (enp1s0f1np1) is DOWN" in found.warned("spark-2")


def test_gid_drift_is_told(discover: Discover) -> None:
    said = discover(trees.gid_drift()).said("spark-1")
    assert "4 on spark-2 rocep1s0f1" in said
    assert "leave NCCL_IB_GID_INDEX unset" in said


def test_an_rdma_device_without_the_gid_that_nccl_needs(discover: Discover) -> None:
    nodes = {
        name: node.change(PORT_1, gid_start=trees.GID_SLOTS)
        for name, node in trees.direct().items()
    }
    assert "rocep1s0f1 has no RoCEv2 GID with an IPv4 address" in discover(nodes).warned("spark-1")


def test_mtu(discover: Discover) -> None:
    found = discover(trees.mtu_reset())
    assert found.warned("spark-1") == ""
    assert "enp1s0f1np1 has MTU 1500, the largest is 9000" in found.warned("spark-2")
    small = {"spark-1": spark(1, {1: TWO_SUBNETS}, mtu=1500)}
    small["spark-2"] = spark(2, {1: TWO_SUBNETS}, mtu=1500)
    assert "set 9000 on every host" in discover(small).warned("spark-1")


def test_a_switch_that_swallows_large_packets(probe_of: Callable[[Node], Probe]) -> None:
    landscape = Landscape({name: probe_of(node) for name, node in trees.direct().items()})
    meetings = meet(landscape)
    lost = Meeting(frames={"spark-2": False})
    meetings["spark-1"] = dict.fromkeys(meetings["spark-1"], lost)
    warnings = propose(landscape, meetings)["spark-1"].warnings
    assert warnings == [
        "A packet of 9000 bytes does not arrive at spark-2: raise the MTU of the switch ports "
        "between, or lower it on all hosts."
    ]


def test_twins(discover: Discover) -> None:
    assert "is in the same subnet (192.168.200.22/24)" in discover(trees.twins_one_subnet()).warned(
        "spark-1"
    )
    assert "has no IPv4 address" in discover(trees.twin_without_address()).warned("spark-2")


def test_renamed_twins_are_known_by_their_place_on_the_bus(discover: Discover) -> None:
    names = {"enp1s0f1np1": "fast0", "enP2p1s0f1np1": "fast1"}

    def renamed(node: Node) -> Node:
        for old, new in names.items():
            node = node.change(old, name=new)
        return node

    nodes = {name: renamed(node) for name, node in trees.direct().items()}
    assert discover(nodes).proposals["spark-1"].hcas == BOTH
    # On another machine the same places are two network cards.
    others = {
        name: node.but(product="Server", gpu_name="NVIDIA H200") for name, node in nodes.items()
    }
    assert discover(others).proposals["spark-1"].hcas == ["rocep1s0f1"]


def test_rdma_beats_speed_and_speed_beats_the_default_route(discover: Discover) -> None:
    def host(n: int, *nics: Nic, default: str) -> Node:
        return Node(f"h{n}", nics, default)

    def nodes(*kinds: dict[str, Any], default: str) -> dict[str, Node]:
        return {
            f"h{n}": host(
                n,
                *(
                    Nic(addresses=(f"10.{index}.0.{n}/24",), pci=f"0000:0{index}:00.0", **kind)
                    for index, kind in enumerate(kinds)
                ),
                default=default,
            )
            for n in (1, 2)
        }

    slow_rdma = {"name": "a", "speed": 10_000, "hca": "mlx5_0"}
    fast, medium = {"name": "b", "speed": 400_000}, {"name": "c", "speed": 100_000}
    found = discover(nodes(slow_rdma, fast, default="c"))
    assert found.proposals["h1"].interface == "a"
    found = discover(nodes(fast, medium, default="b"))
    assert found.proposals["h1"].interface == "b"
    same = {"name": "d", "speed": 100_000}
    found = discover(nodes(medium, same, default="c"))
    assert found.proposals["h1"].interface == "d"
    assert "carries the default route" in found.said("h1")


@pytest.mark.parametrize("kind", ["wireless", "bridge", "tun", "wireguard"])
def test_never_wifi_bridges_or_vpns(kind: str, discover: Discover) -> None:
    nodes = {
        f"h{n}": Node(f"h{n}", (Nic("x0", (f"10.0.0.{n}/24",), kind=kind, speed=10**6),))
        for n in (1, 2)
    }
    said = refusal(discover, nodes)
    assert "h1 has no usable address at all; its interfaces: x0 (" in said
    assert "What to do: on h1, h2, give both ends of the fast cable fixed addresses" in said


@pytest.mark.parametrize(
    "name", ["docker1", "br-1a2b", "virbr0", "cni0", "flannel.1", "cali12", "vethab12", "vnet0"]
)
def test_never_networks_inside_a_host(name: str, discover: Discover) -> None:
    nodes = {
        f"h{n}": Node(f"h{n}", (Nic(name, (f"10.0.0.{n}/24",), kind="virtual"),)) for n in (1, 2)
    }
    assert f"{name} (a network inside the host)" in refusal(discover, nodes)


def test_virtual_interfaces_come_last_but_count(discover: Discover) -> None:
    def nodes(*nics: Callable[[int], Nic]) -> dict[str, Node]:
        return {f"h{n}": Node(f"h{n}", tuple(nic(n) for nic in nics), "eth0") for n in (1, 2)}

    def virtual(n: int) -> Nic:
        return Nic("fabric0", (f"192.168.200.{n}/24",), kind="virtual", speed=10_000)

    def slow(n: int) -> Nic:
        return Nic("eth0", (f"10.0.0.{n}/24",), pci="0000:00:03.0", speed=1000)

    assert discover(nodes(virtual)).proposals["h1"].interface == "fabric0"
    found = discover(nodes(virtual, slow))
    assert found.proposals["h1"].interface == "eth0"
    assert "Not fabric0 192.168.200.1/24: it joins the hosts too, but is a virtual" in found.said(
        "h1"
    )


@pytest.mark.parametrize("kind", ["bond", "vlan"])
def test_bonds_and_vlans_are_cables(kind: str, discover: Discover) -> None:
    nodes = {
        f"h{n}": Node(
            f"h{n}",
            (
                Nic("up0", (f"192.168.200.{n}/24",), kind=kind, speed=200_000),
                Nic("eth0", (f"10.0.0.{n}/24",), pci="0000:00:03.0", speed=1000),
            ),
        )
        for n in (1, 2)
    }
    assert discover(nodes).proposals["h1"].interface == "up0"


def test_rdma_on_another_network_is_turned_off(discover: Discover) -> None:
    """NCCL would find it and hang."""
    nodes = trees.no_roce()
    storage = Nic("ib0", ("172.30.0.1/24",), hca="mlx5_9", pci="0000:81:00.0", speed=100_000)
    nodes["box-1"] = nodes["box-1"].but(nics=(*nodes["box-1"].nics, storage))
    found = discover(nodes)
    assert found.proposals["box-1"].hcas == []
    assert "NCCL would take mlx5_9" in found.said("box-1")
    assert found.proposals["box-2"].hcas is None


def test_rdma_on_one_side_only(discover: Discover) -> None:
    nodes = trees.direct()
    for name in (PORT_1, PORT_1_TWIN):
        nodes["spark-2"] = nodes["spark-2"].change(name, hca=None)
    found = discover(nodes)
    assert "spark-1 have RDMA on this network, this host has not" in found.warned("spark-2")


def test_a_device_with_two_ports_is_named_with_its_port(probe_of: Callable[[Node], Probe]) -> None:
    def with_second_port(probe: Probe) -> Probe:
        first = next(hca for hca in probe.hcas if hca.name == "rocep1s0f1")
        second = first.model_copy(update={"port": 2, "state": "DOWN", "interfaces": ["x"]})
        return probe.model_copy(update={"hcas": [*probe.hcas, second]})

    nodes = trees.direct()
    landscape = Landscape({name: with_second_port(probe_of(node)) for name, node in nodes.items()})
    found = propose(landscape, meet(landscape))["spark-1"]
    assert found.hcas == ["rocep1s0f1:1", "roceP2p1s0f1"]
    entry = Entry("spark-1", found)
    fabric = yaml.safe_load(hosts_section.section([entry]))["hosts"]["spark-1"]["fabric"]
    assert fabric["hcas"] == found.hcas


def test_no_gpu(discover: Discover) -> None:
    nodes = {name: node.but(commands=("ip",)) for name, node in trees.direct().items()}
    found = discover(nodes)
    assert "gpus:" not in re.sub(r"#.*", "", found.text)
    assert "nvidia-smi: not found" in found.said("spark-1")
    assert found.cluster.hosts["spark-1"].gpus == 1


def test_one_host_alone(discover: Discover) -> None:
    found = discover({"spark-1": trees.direct()["spark-1"]})
    assert found.proposals["spark-1"].interface == PORT_1
    assert "nothing was tried" in found.said("spark-1")


def test_a_network_that_passes_one_direction_only_is_not_taken(discover: Discover) -> None:
    blocked = frozenset({("192.168.200.0/24", "spark-2", "spark-1")})
    found = discover(trees.direct(), blocked)
    assert found.proposals["spark-1"].interface == PORT_1_TWIN
    assert (
        "enp1s0f1np1, the other half of this port, does not join all hosts (192.168.200.0/24: "
        "spark-2 does not reach spark-1 there (no answer))"
    ) in found.warned("spark-1")


def test_every_network_blocked_in_one_direction(discover: Discover) -> None:
    networks = ("192.168.200.0/24", "192.168.201.0/24", "10.1.230.0/24")
    said = refusal(discover, trees.direct(), frozenset((n, "spark-2", "spark-1") for n in networks))
    assert said.startswith("No network joins spark-1, spark-2 in both directions:")
    assert (
        "spark-1 enp1s0f1np1 192.168.200.12/24, spark-2 enp1s0f1np1 192.168.200.13/24: spark-2 does"
        " not reach spark-1 (no answer), but back works"
    ) in said
    assert "A firewall blocks one direction" in said


def test_a_cable_that_is_not_there(discover: Discover) -> None:
    networks = ("192.168.200.0/24", "192.168.201.0/24", "10.1.230.0/24")
    blocked = {(n, *pair) for n in networks for pair in (("spark-1", "spark-2"),)}
    blocked |= {(n, "spark-2", "spark-1") for n in networks}
    said = refusal(discover, trees.direct(), frozenset(blocked))
    assert "neither direction works (no answer; back: no answer)" in said
    assert "What to do: give both ends" in said


def test_a_ring_without_another_network(discover: Discover) -> None:
    said = refusal(discover, trees.ring(office=False))
    assert said.count("both directions work") == 6
    assert "This is a ring" in said
    assert "NCCL_IB_SUBNET_AWARE_ROUTING: 1" in said


def test_a_ring_with_an_office_network(discover: Discover) -> None:
    said = discover(trees.ring()).said("spark-2")
    assert "Without this line NCCL would take" in said
    assert "spark-2 [rocep1s0f0, roceP2p1s0f0, rocep1s0f1, roceP2p1s0f1]" in said


def test_two_hosts_with_no_subnet_in_common(discover: Discover) -> None:
    nodes = {
        "spark-1": spark(1, {1: TWO_SUBNETS}, office=False),
        "spark-2": spark(2, {1: OTHER_SUBNETS}, office=False),
    }
    said = refusal(discover, nodes)
    assert "spark-1 and spark-2 share no subnet. spark-1: enp1s0f1np1 192.168.200.12/24" in said


def test_the_same_address_on_both_hosts(discover: Discover) -> None:
    node = spark(1, {1: TWO_SUBNETS}, office=False).change(PORT_1_TWIN, addresses=())
    nodes = {"a": node, "b": node.but(hostname="b")}
    assert "both have 192.168.200.12: each needs its own" in refusal(discover, nodes)


def test_prefix_lengths_that_differ(discover: Discover) -> None:
    nodes = {name: node.change("enP7s7", addresses=()) for name, node in trees.direct().items()}
    nodes["spark-2"] = nodes["spark-2"].change(PORT_1, addresses=("192.168.200.13/16",))
    nodes["spark-2"] = nodes["spark-2"].change(PORT_1_TWIN, addresses=())
    assert "prefix lengths of enp1s0f1np1 192.168.200.12/24" in refusal(discover, nodes)


@pytest.mark.parametrize("address", ["169.254.7.1/16", "10.0.0.1/32", "nonsense", "::1/64"])
def test_addresses_that_are_no_place(address: str, discover: Discover) -> None:
    nodes = {
        name: Node(name, (Nic("eth0", ("10.0.0.9/24",), pci="0000:00:03.0"),)) for name in "ab"
    }
    interface = {"name": "eth0", "kind": "physical", "mtu": 1500, "carrier": True}
    probe = Probe.model_validate(
        {"hostname": "h", "interfaces": [{**interface, "addresses": [address]}]}
    )
    said = refusal(discover, nodes, interfaces=probe.interfaces)
    assert f"eth0 ({address} is not an address in a fixed subnet)" in said


def test_a_host_without_ip(discover: Discover) -> None:
    nodes = trees.direct()
    nodes["spark-2"] = nodes["spark-2"].but(commands=("docker",))
    said = refusal(discover, nodes)
    assert "spark-2 cannot list its addresses: ip: not found. Install iproute2 there." in said


@pytest.mark.slow
def test_a_huge_list_of_interfaces(probe_of: Callable[[Node], Probe]) -> None:
    spark_1, spark_2 = map(probe_of, trees.direct().values())
    extra = [
        Interface(
            name=f"x{n}", kind="virtual", carrier=True, addresses=[f"10.{n // 250}.{n % 250}.1/24"]
        )
        for n in range(2000)
    ]
    probes = {
        "spark-1": spark_1.model_copy(update={"interfaces": [*spark_1.interfaces, *extra]}),
        "spark-2": spark_2.model_copy(update={"interfaces": [*spark_2.interfaces, *extra]}),
    }
    landscape = Landscape(probes)
    began = time.monotonic()
    proposals = propose(landscape, meet(landscape))
    assert time.monotonic() - began < 30
    assert proposals["spark-1"].interface == PORT_1
    assert proposals["spark-1"].why[-1].startswith("Nor 19")
    with pytest.raises(NoFabricError) as caught:
        propose(Landscape({**probes, "b": probe_of(spark(9, {}, office=False))}), {})
    assert max(map(len, caught.value.lines)) < 1000


def test_nobody_tried(probe_of: Callable[[Node], Probe]) -> None:
    landscape = Landscape({name: probe_of(node) for name, node in trees.direct().items()})
    with pytest.raises(NoFabricError, match="spark-1 did not try"):
        propose(landscape, {})


# The hosts section of a user's own file


FILE = """\
# ours
image: i # pinned
model: m

hosts: # the boxes
  # in the rack
  spark-1:
    role: head # has the office network
    # the cable
    fabric: {address: 10.0.0.1, interface: eth0} # old
    ssh:
      address: 10.1.230.180
    env: {NCCL_DEBUG: INFO} # for now
    # gpus: 1
  # behind the head
  spark-2:
    fabric:
      # by hand
      address: 192.168.200.13/24
      interface: enp1s0f1np1
      hcas: [roceP2p1s0f1, rocep1s0f1] # both
    # and that is all

serve: # the API
  port: 8001
"""


def entries(discover: Discover, nodes: dict[str, Node] | None = None) -> list[Entry]:
    found = discover(nodes or trees.direct())
    return [Entry(name, proposal) for name, proposal in found.proposals.items()]


def test_only_what_differs_is_written_anew(discover: Discover) -> None:
    edit = edited(FILE, entries(discover))
    assert edit.kept == ["spark-2"]
    assert [line for line in FILE.splitlines() if line not in edit.text.splitlines()] == [
        "    fabric: {address: 10.0.0.1, interface: eth0} # old",
    ]
    values = yaml.safe_load(edit.text)
    assert values["hosts"]["spark-1"] == {
        "role": "head",
        "fabric": {"address": "192.168.200.12/24", "interface": PORT_1, "hcas": BOTH},
        "ssh": {"address": "10.1.230.180"},
        "env": {"NCCL_DEBUG": "INFO"},
    }
    again = edited(edit.text, entries(discover))
    assert again.text == edit.text
    assert again.kept == ["spark-1", "spark-2"]
    assert hosts_section.diff(edit.text, again.text, "f") == ""


def test_an_earlier_comment_goes_and_a_persons_stays(discover: Discover) -> None:
    first = edited(FILE, entries(discover)).text
    assert "    # the cable\n    # Discovered: enp1s0f1np1: RDMA" in first
    assert "    # Not wlP9s9 10.7.0.1/16: Wi-Fi.\n    fabric:\n" in first
    second = edited(first, entries(discover, trees.half_up())).text
    assert second.count("Discovered:") == 2
    assert second.count("# Not wlP9s9 10.7.0.1/16") == 1
    assert "    # the cable\n    # Discovered:" in second
    assert "hcas: [rocep1s0f1]\n" in second
    third = edited(second, entries(discover)).text
    assert third.count("Discovered:") == 2
    assert "WARNING" not in third


def test_gpus_that_cannot_be_counted_stay(discover: Discover) -> None:
    nodes = {name: node.but(commands=("ip",)) for name, node in trees.direct().items()}
    text = f"{FORMS['one line']}\n"
    assert yaml.safe_load(edited(text, entries(discover, nodes)).text)["hosts"]["spark-1"] == {
        "role": "head",
        "fabric": {"address": "192.168.200.12/24", "interface": PORT_1, "hcas": BOTH},
        "gpus": 4,
    }


def test_hosts_come_and_go(discover: Discover) -> None:
    three = edited(FILE, entries(discover, trees.switch())).text
    assert list(yaml.safe_load(three)["hosts"]) == ["spark-1", "spark-2", "spark-3"]
    assert "    # and that is all\n  spark-3:\n" in three
    back = edited(three, entries(discover)).text
    assert list(yaml.safe_load(back)["hosts"]) == ["spark-1", "spark-2"]
    only = edited(three, entries(discover, {"spark-3": trees.switch()["spark-3"]})).text
    assert yaml.safe_load(only)["hosts"]["spark-3"]["role"] == "head"
    assert "behind the head" not in only


FORMS = {
    "one line": "hosts: {spark-1: {role: head, gpus: 4, fabric: {address: 1.1.1.1, interface: a}}}",
    "a line per host": """
hosts:
  spark-1: {role: head, gpus: 4, env: {A: b},
    fabric: {address: 1.1.1.1, interface: a}}
""",
    "a worker alone": """
hosts:
  spark-1:
    role: worker
    fabric:
      address: 1.1.1.1
      interface: a
""",
    "four spaces": """
hosts:
    spark-1:
        fabric:
            address: 1.1.1.1
            interface: a
""",
    "nothing": "hosts:",
    "empty": "hosts: {}",
    "hosts without anything": """
hosts:
  spark-1:
  spark-2:
""",
    "an empty host": """
hosts:
  spark-1: {}
""",
    "a list": "hosts: [spark-1]",
    "an alias": """
hosts:
  other: &o
    fabric: {address: 1.1.1.1, interface: a}
  spark-1: *o
""",
    "an anchor before": """
x: &f {address: 1.1.1.1, interface: a}
hosts:
  spark-1:
    role: head
    fabric: *f
""",
    "a block scalar at the end": """
hosts:
  spark-1:
    role: head
    fabric: 3
    env:
      A: |
        long
        text

""",
    "quotes": """
"hosts":
  "spark-1":
    "role": "head"
    "fabric":
      "address": 1.1.1.1
""",
    "no hosts": "",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rest", ["", "serve:\n  port: 8001\n", "# the end"])
def test_files_of_every_form(form: str, rest: str, discover: Discover) -> None:
    text = f"image: i\nmodel: m\n{FORMS[form]}\n{rest}"
    edit = edited(text, entries(discover))
    before, after = yaml.safe_load(text), yaml.safe_load(edit.text)
    found = after.pop("hosts")
    before.pop("hosts", None)
    assert after == before
    heads = [name for name, host in found.items() if host.get("role") == "head"]
    assert heads == ["spark-1"]
    assert {name: host["fabric"]["interface"] for name, host in found.items()} == {
        "spark-1": PORT_1,
        "spark-2": PORT_1,
    }


def test_an_anchor_that_the_rest_needs_is_left_to_a_person(discover: Discover) -> None:
    text = "hosts:\n  other:\n    env: &e {A: b}\nenv: *e\n"
    with pytest.raises(EditError, match="by hand"):
        edited(text, entries(discover))


def test_hcas_that_mean_something_else(discover: Discover) -> None:
    """[] turns RDMA off, absent lets NCCL look."""
    box = entries(discover, trees.no_roce())
    text = hosts_section.new_file(box)
    off = text.replace("interface: ens2f0\n", "interface: ens2f0\n      hcas: []\n")
    assert edited(off, box).kept == ["box-1", "box-2"]
    ring = entries(discover, trees.ring())
    text = hosts_section.new_file(ring)
    assert edited(text, ring).text == text
    absent = text.replace("      hcas: []\n", "", 1)
    assert edited(absent, ring).kept == ["spark-2", "spark-3"]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_comments_survive(data: st.DataObject, discover: Discover) -> None:
    lines = FILE.splitlines()
    marks = []
    for number in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(lines)))
        indent = data.draw(st.sampled_from([0, 2, 4, 6]))
        marks.append(f"{' ' * indent}# mark {number}")
        lines.insert(place, marks[-1])
    text = "\n".join(lines) + "\n"
    result = edited(text, entries(discover)).text.splitlines()
    before = yaml.safe_load(text)
    after = yaml.safe_load("\n".join(result))
    assert after["hosts"]["spark-2"] == before["hosts"]["spark-2"]
    assert [mark for mark in marks if mark not in result] == []


# The task, through the real CLI


@dataclass
class Stage:
    """Hosts played by @fake: what their trees say is real, their meetings are made up."""

    nodes: dict[str, Node]
    blocked: Blocked = frozenset()
    commands: int = 0
    answers: dict[str, Any] = field(default_factory=dict)
    """What a host prints instead, by host name; None: it fails."""

    def run(
        self, name: str, command: Any, answer_of: Callable[[Node], dict[str, Any]]
    ) -> tuple[bool, CommandOutput]:
        name = name.removeprefix("@fake/")
        self.commands += 1
        if name in self.answers:
            text = self.answers[name]
            is_good = text is not None
            line = OutputLine("stdout" if is_good else "stderr", text or "python3: not found")
            return is_good, CommandOutput([line])
        words = shlex.split(command.get_masked_value())
        assert words[:3] == ["python3", "-", "probe"]
        wanted = json.loads(words[3])
        if "meetings" in wanted:
            answer = {
                "meetings": {
                    key: self._met(name, key, meeting)
                    for key, meeting in wanted["meetings"].items()
                }
            }
        else:
            answer = answer_of(self.nodes[name])
        return True, CommandOutput([OutputLine("stdout", json.dumps(answer))])

    def _met(self, name: str, network: str, meeting: dict[str, Any]) -> dict[str, Any]:
        peers = meeting["peers"]
        failures = [
            {"peer": peer, "port": port, "error": "no answer"}
            for peer in peers
            for port in meeting["ports"]
            if (network, name, peer) in self.blocked
        ]
        return {"failures": failures, "frames": dict.fromkeys(peers, True)}


@dataclass
class Outcome:
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer_of: Callable[[Node], dict[str, Any]]
) -> Iterator[Callable[..., Outcome]]:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(pyinfra, "is_cli", True)

    def call(
        *arguments: str,
        stage: Stage | None = None,
        cluster: Path | None = None,
        inventory: str | None = None,
        yes: str = "-y",
    ) -> Outcome:
        stage = stage or Stage(trees.direct())
        monkeypatch.setattr(
            FakeConnector,
            "run_shell_command",
            lambda self, command, **options: stage.run(self.host.name, command, answer_of),
        )
        monkeypatch.setenv("CLUSTER", str(cluster or tmp_path / "none.yaml"))
        ctx_state.reset()
        ctx_inventory.reset()
        logging.getLogger("pyinfra").handlers.clear()
        hosts = inventory or ",".join(f"@fake/{name}" for name in stage.nodes)
        quick = ("--data", "fake_delay=0", "--data", "fake_delay_jitter=0")
        result = CliRunner().invoke(cli, [yes, hosts, "tasks/discover.py", *quick, *arguments])
        assert "Traceback" not in result.output
        return Outcome(result.exit_code, result.stdout, result.stderr)

    yield call
    ctx_state.reset()
    ctx_inventory.reset()


Task = Callable[..., Outcome]


def test_the_section_is_printed(task: Task) -> None:
    result = task()
    assert result.code == 0, result.stderr
    cluster = Cluster.model_validate({**MINIMAL, **yaml.safe_load(result.stdout)})
    assert cluster.head == "spark-1"
    assert str(cluster.head_address) == "192.168.200.12"


def test_the_first_host_given_is_the_head(task: Task) -> None:
    result = task(inventory="@fake/spark-2,@fake/spark-1")
    values = yaml.safe_load(result.stdout)["hosts"]
    assert list(values) == ["spark-2", "spark-1"]
    assert values["spark-2"]["role"] == "head"


def test_a_dry_run_touches_no_host(task: Task, tmp_path: Path) -> None:
    stage = Stage(trees.direct())
    result = task(stage=stage, yes="--dry")
    assert (result.code, result.stdout, stage.commands) == (0, "", 0)


def test_a_file_is_compared_and_left_alone(task: Task, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE, encoding="utf-8")
    result = task(cluster=path)
    assert result.code == 0, result.stderr
    assert path.read_text(encoding="utf-8") == FILE
    assert "-    fabric: {address: 10.0.0.1, interface: eth0} # old\n" in result.stdout
    assert "+      address: 192.168.200.12/24\n" in result.stdout
    assert "spark-2" not in result.stdout.replace("tried with spark-2", "")
    assert f"--data write={path} --data overwrite=yes" in result.stderr
    result = task("--data", f"write={path}", "--data", "overwrite=yes", cluster=path)
    assert result.code == 0, result.stderr
    written = path.read_text(encoding="utf-8")
    assert "# behind the head" in written
    assert load(path).hosts["spark-1"].fabric.hcas == BOTH
    result = task(cluster=path)
    assert result.stdout == ""
    assert f"{path} says the same already" in result.stderr


def test_hosts_of_an_inventory_keep_their_head(task: Task, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE, encoding="utf-8")
    result = task(cluster=path, inventory="@fake/spark-2,@fake/spark-1")
    assert "role" not in result.stdout.replace("     role: head # has the office", "")


def test_a_new_file_can_be_loaded(task: Task, tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    assert task("--data", f"write={path}").code == 0
    assert load(path).nodes == ["spark-1", "spark-2"]


@pytest.mark.parametrize(
    ("write", "content", "said"),
    [
        ("{folder}/there.yaml", FILE, "there.yaml is there already and stays as it is"),
        ("{folder}/none/there.yaml", None, "none/there.yaml: No such file or directory"),
        ("{folder}", None, "is there already"),
        ("true", None, "give the path of a file, write=PATH"),
        ("7", None, "give the path of a file, write=PATH"),
    ],
)
def test_what_is_not_written(
    write: str, content: str | None, said: str, task: Task, tmp_path: Path
) -> None:
    if content:
        (tmp_path / "there.yaml").write_text(content, encoding="utf-8")
    result = task("--data", f"write={write.format(folder=tmp_path)}")
    assert result.code == 1
    assert said in result.stderr
    if content:
        assert (tmp_path / "there.yaml").read_text(encoding="utf-8") == content


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"hosts: [\n", "not YAML"),
        (b"\xff\xfe", "utf-8"),
        (b"- a\n", "the file holds a list"),
        (b"", "the file is empty"),
    ],
)
def test_a_file_that_is_no_cluster_file(
    content: bytes, said: str, task: Task, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(content)
    result = task(cluster=path)
    assert result.code == 0
    assert "hosts:\n" in result.stdout
    assert f"{path} is not compared" in result.stderr
    assert said in result.stderr
    result = task("--data", f"write={path}", "--data", "overwrite=yes", cluster=path)
    assert result.code == 1
    assert said in result.stderr
    assert path.read_bytes() == content


def test_no_fabric_is_a_refusal_not_a_traceback(task: Task, tmp_path: Path) -> None:
    networks = ("192.168.200.0/24", "192.168.201.0/24", "10.1.230.0/24")
    blocked = frozenset((n, "spark-1", "spark-2") for n in networks)
    result = task(stage=Stage(trees.direct(), blocked))
    assert (result.code, result.stdout) == (1, "")
    assert "A firewall blocks one direction" in result.stderr


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "The host needs Python 3.8 or newer"),
        ("Welcome to spark-2!", "the probe printed no JSON: 'Welcome to spark-2!'"),
        ("[]", "the probe printed no object"),
        ("{}", "the probe's answer is not usable: hostname: Field required"),
        ('{"hostname": "x", "interfaces": 3}', "not usable: interfaces"),
    ],
)
def test_a_host_that_cannot_be_probed_is_named(
    answer: str | None, said: str, task: Task, tmp_path: Path
) -> None:
    result = task(stage=Stage(trees.direct(), answers={"spark-2": answer}))
    assert (result.code, result.stdout) == (1, "")
    assert said in result.stderr
    assert "spark-2" in result.stderr


def test_names_that_cluster_yaml_does_not_allow(task: Task, tmp_path: Path) -> None:
    nodes = {"spark_1": trees.direct()["spark-1"], "spark-2": trees.direct()["spark-2"]}
    result = task(stage=Stage(nodes))
    assert result.code == 1
    assert "'spark_1' cannot be a host's name in cluster.yaml" in result.stderr


def test_a_host_that_was_given_twice() -> None:
    with pytest.raises(operations.DiscoverError, match="given twice: @ssh/a, a"):
        operations._check({"@ssh/a": "a", "a": "a"})


def test_an_address_becomes_the_name_that_the_file_or_the_host_has(
    task: Task, tmp_path: Path
) -> None:
    nodes = dict(zip(("10.1.230.180", "10.1.230.181"), trees.direct().values(), strict=True))
    result = task(stage=Stage(nodes))
    hosts = yaml.safe_load(result.stdout)["hosts"]
    assert {name: host["ssh"] for name, host in hosts.items()} == {
        "spark-1": {"address": "10.1.230.180"},
        "spark-2": {"address": "10.1.230.181"},
    }
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE.replace("spark-1", "big-box"), encoding="utf-8")
    result = task(stage=Stage(nodes), cluster=path)
    assert "  big-box:" in result.stdout
    assert "-  big-box:" not in result.stdout


def test_what_ssh_knows(task: Task, tmp_path: Path) -> None:
    config = tmp_path / "ssh_config"
    config.write_text(
        "Host spark-1\n HostName 10.1.230.180\n Port 2222\n User nvidia\n IdentityFile /k\n"
        "Host spark-2\n HostName 192.168.200.13\n ProxyJump nvidia@spark-1:22\n",
        encoding="utf-8",
    )
    result = task("--data", f"ssh_config_file={config}")
    hosts = yaml.safe_load(result.stdout)["hosts"]
    assert hosts["spark-1"]["ssh"] == {
        "address": "10.1.230.180",
        "user": "nvidia",
        "port": 2222,
        "key": "/k",
    }
    assert hosts["spark-2"]["ssh"] == {"address": "192.168.200.13", "via": "spark-1"}
    result = task("--user", "admin")
    assert yaml.safe_load(result.stdout)["hosts"]["spark-1"]["ssh"] == {"user": "admin"}
