"""Fake hosts as folders: what remote/probe.py would read there, from a few lines of description.

Names are those of the DGX Spark: each QSFP port is two interfaces and two RDMA devices. Speeds,
MACs and kernels are examples.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.resources import files
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

from cluster.remote import probe

GID_SLOTS = 8  # mlx5 has 255; empty ones read as zeros
ZERO_GID = ":".join(["0000"] * 8)
MTU = 9000


def remove(root: Path) -> None:
    """Remove a tree; to be done as soon as it has been read.

    Left to pytest, or to shutil, every directory of it stays open until gevent's loop runs
    (gevent.os.close), and a few dozen trees are enough for "Too many open files".
    """
    subprocess.run(["rm", "-rf", "--", str(root)], check=True, timeout=60)


@dataclass(frozen=True)
class Nic:
    """A network interface, and the RDMA device on it."""

    name: str
    addresses: tuple[str, ...] = ()
    mtu: int = 1500
    speed: int | None = None
    """Mb/s; None: the kernel does not say."""
    up: bool = True
    kind: str = "physical"
    """physical, wireless, bridge, tun, wireguard, bond, vlan, virtual."""
    pci: str = ""
    driver: str = ""
    hca: str | None = None
    hca_up: bool | None = None
    """Default: as the interface."""
    gid_start: int = 2
    """First slot of the GID table with an IPv4 address; version 2 is in the slot behind it."""
    link_layer: str = "Ethernet"


@dataclass(frozen=True)
class Node:
    """A host."""

    hostname: str
    nics: tuple[Nic, ...]
    default_route: str | None = None
    gpus: int = 1
    gpu_name: str = "NVIDIA GB10"
    gpu_memory: str = "[N/A]"
    """MiB; nvidia-smi does not know it on unified memory."""
    product: str = "NVIDIA_DGX_Spark"
    commands: tuple[str, ...] = ("ip", "nvidia-smi", "docker")
    """Those that are installed."""

    def change(self, name: str, /, **changes: Any) -> Node:
        """The same host with another interface `name`."""
        assert any(nic.name == name for nic in self.nics), name
        nics = tuple(replace(nic, **changes) if nic.name == name else nic for nic in self.nics)
        return replace(self, nics=nics)

    def but(self, **changes: Any) -> Node:
        """The same host with other properties."""
        return replace(self, **changes)


# The four functions of a Spark's ConnectX-7, by port: (interface, RDMA device, PCI address).
PORTS = {
    0: (
        ("enp1s0f0np0", "rocep1s0f0", "0000:01:00.0"),
        ("enP2p1s0f0np0", "roceP2p1s0f0", "0002:01:00.0"),
    ),
    1: (
        ("enp1s0f1np1", "rocep1s0f1", "0000:01:00.1"),
        ("enP2p1s0f1np1", "roceP2p1s0f1", "0002:01:00.1"),
    ),
}
LO = Nic("lo", ("127.0.0.1/8",), mtu=65536, kind="loopback")
DOCKER0 = Nic("docker0", ("172.17.0.1/16",), up=False, kind="bridge")
OFFICE, WIFI = "enP7s7", "wlP9s9"


def spark(
    number: int,
    cables: dict[int, tuple[str, ...]],
    *,
    office: bool = True,
    default_route: bool | None = None,
    mtu: int = MTU,
) -> Node:
    """DGX Spark spark-NUMBER; `cables` is port -> the subnets of its two interfaces (a.b.c).

    On port 1's first subnet, 192.168.200, spark-1 is .12, spark-2 is .13, and so on.
    """
    nics = [LO]
    for port, functions in PORTS.items():
        subnets = cables.get(port, ())
        for index, (name, hca, pci) in enumerate(functions):
            addresses = (f"{subnets[index]}.{11 + number}/24",) if index < len(subnets) else ()
            nics.append(
                Nic(
                    name,
                    addresses,
                    mtu=mtu if port in cables else 1500,
                    speed=100_000 if port in cables else None,
                    up=port in cables,
                    pci=pci,
                    driver="mlx5_core",
                    hca=hca,
                )
            )
    is_routed = office if default_route is None else default_route
    nics += [
        Nic(
            OFFICE,
            (f"10.1.230.{179 + number}/24",) if office else (),
            speed=10_000 if office else None,
            up=office,
            pci="0007:01:00.0",
            driver="r8127",
        ),
        Nic(WIFI, (f"10.7.0.{number}/16",), kind="wireless", pci="0009:01:00.0", driver="mt7925e"),
        DOCKER0,
    ]
    return Node(f"spark-{number}", tuple(nics), OFFICE if is_routed else None)


def box(number: int) -> Node:
    """A host with one plain 10 GbE link to the others, an office network and eight GPUs."""
    nics = (
        LO,
        Nic("eno1", (f"10.1.230.{number}/24",), speed=1000, pci="0000:02:00.0", driver="igb"),
        Nic(
            "ens2f0",
            (f"192.168.200.{11 + number}/24",),
            speed=10_000,
            pci="0000:41:00.0",
            driver="ixgbe",
        ),
        DOCKER0,
    )
    node = Node(f"box-{number}", nics, "eno1", gpus=8, gpu_name="NVIDIA H200")
    return node.but(gpu_memory="143771", product="Example Server")


TWO_SUBNETS = ("192.168.200", "192.168.201")
OTHER_SUBNETS = ("192.168.210", "192.168.211")
PORT_1 = PORTS[1][0][0]
PORT_1_TWIN = PORTS[1][1][0]


def _pair(one: Node, other: Node) -> dict[str, Node]:
    return {one.hostname: one, other.hostname: other}


def direct() -> dict[str, Node]:
    """Two Sparks, one cable on port 1, its two interfaces in two subnets."""
    return _pair(spark(1, {1: TWO_SUBNETS}), spark(2, {1: TWO_SUBNETS}))


def dual_cable() -> dict[str, Node]:
    """Two Sparks, both ports cabled."""
    cables = {1: TWO_SUBNETS, 0: OTHER_SUBNETS}
    return _pair(spark(1, cables), spark(2, cables))


def switch() -> dict[str, Node]:
    """Three Sparks on one switch."""
    return {f"spark-{n}": spark(n, {1: TWO_SUBNETS}) for n in (1, 2, 3)}


def ring(office: bool = True) -> dict[str, Node]:
    """Three Sparks, each cabled to both others: every cable is a network of its own."""
    links = {n: (f"192.168.{100 + n}", f"192.168.{110 + n}") for n in (1, 2, 3)}
    return {
        f"spark-{n}": spark(n, {0: links[n], 1: links[n % 3 + 1]}, office=office) for n in (1, 2, 3)
    }


def half_up() -> dict[str, Node]:
    """The second half of spark-2's port is down."""
    hosts = direct()
    hosts["spark-2"] = hosts["spark-2"].change(PORT_1_TWIN, up=False)
    return hosts


def gid_drift() -> dict[str, Node]:
    """The RoCEv2 IPv4 GID has index 3 on spark-1 and 4 on spark-2."""
    hosts = direct()
    hosts["spark-2"] = hosts["spark-2"].change(PORT_1, gid_start=3)
    return hosts


def mtu_reset() -> dict[str, Node]:
    """A firmware reset has left spark-2 with MTU 1500."""
    hosts = direct()
    for name in (PORT_1, PORT_1_TWIN):
        hosts["spark-2"] = hosts["spark-2"].change(name, mtu=1500)
    return hosts


def twins_one_subnet() -> dict[str, Node]:
    """Both halves of the port in one subnet, as an old playbook has it."""
    hosts = direct()
    for index, host in enumerate(list(hosts)):
        twin = (f"192.168.200.{22 + index}/24",)
        hosts[host] = hosts[host].change(PORT_1_TWIN, addresses=twin)
    return hosts


def twin_without_address() -> dict[str, Node]:
    """The second half of the port has no address, so its RDMA device has no IPv4 GID."""
    hosts = direct()
    return {name: node.change(PORT_1_TWIN, addresses=()) for name, node in hosts.items()}


def no_roce() -> dict[str, Node]:
    """Plain 10 GbE hosts without RDMA."""
    return _pair(box(1), box(2))


def no_default_route() -> dict[str, Node]:
    """Two Sparks that have no default route."""
    return _pair(
        spark(1, {1: TWO_SUBNETS}, default_route=False),
        spark(2, {1: TWO_SUBNETS}, default_route=False),
    )


def worker_without_office() -> dict[str, Node]:
    """Only the head is on the office network."""
    worker = spark(2, {1: TWO_SUBNETS}, office=False).change(WIFI, addresses=(), up=False)
    return _pair(spark(1, {1: TWO_SUBNETS}), worker)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        *(direct, dual_cable, switch, ring, half_up, gid_drift, mtu_reset, twins_one_subnet),
        *(twin_without_address, no_roce, no_default_route, worker_without_office),
    )
}


def build(folder: Path, nodes: dict[str, Node]) -> dict[str, Path]:
    """Write every host under `folder`; return the root of each."""
    return {name: build_node(folder / name, node) for name, node in nodes.items()}


def build_node(root: Path, node: Node) -> Path:
    """Write one host; return its root."""
    tree = _Tree(root)
    (root / "sys/class/net").mkdir(parents=True, exist_ok=True)
    tree.file("sys/class/net/bonding_masters", "")  # not an interface
    for index, nic in enumerate(node.nics):
        _interface(tree, nic, index)
        if nic.hca:
            _hca(tree, nic, index)
    tree.file("proc/sys/kernel/hostname", node.hostname)
    tree.file("proc/sys/kernel/osrelease", "6.14.0-1013-nvidia")
    tree.file("sys/class/dmi/id/product_name", node.product)
    tree.file("etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {node.hostname}\n::1 localhost")
    tree.file("proc/net/route", _routes(node))
    tree.file("proc/meminfo", _MEMORY)
    if any(nic.hca for nic in node.nics):
        tree.file("dev/infiniband/uverbs0", "")
    outputs = {"ip": _ip(node), "nvidia-smi": _nvidia_smi(node), "docker": _DOCKER}
    for command in node.commands:
        tree.file(f"commands/{command}", outputs[command])
    return root


_MEMORY = """\
MemTotal:       127600000 kB
MemFree:        100000000 kB
MemAvailable:   118000000 kB
Buffers:           200000 kB
Cached:          17000000 kB
SwapTotal:       16777212 kB
"""
_DOCKER = json.dumps(
    {
        "ServerVersion": "28.3.3",
        "DockerRootDir": "/var/lib/docker",
        "Runtimes": {"nvidia": {"path": "nvidia-container-runtime"}, "runc": {"path": "runc"}},
    }
)


class _Tree:
    def __init__(self, root: Path) -> None:
        self.root = root

    def file(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")

    def link(self, path: str, target: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)


def _mac(index: int) -> str:
    return f"4c:bb:47:00:00:{index:02x}"


def _interface(tree: _Tree, nic: Nic, index: int) -> None:
    path = f"sys/class/net/{nic.name}"
    tree.file(f"{path}/mtu", str(nic.mtu))
    tree.file(f"{path}/address", "00:00:00:00:00:00" if nic.kind == "loopback" else _mac(index))
    # On an interface that is down the kernel answers EINVAL for both.
    if nic.up:
        tree.file(f"{path}/carrier", "1")
    if nic.kind not in {"loopback", "wireless"}:
        tree.file(f"{path}/speed", str(nic.speed if nic.speed and nic.up else -1))
    device_types = {"bond": "bond", "bridge": "bridge", "vlan": "vlan", "wireguard": "wireguard"}
    device_type = {**device_types, "wireless": "wlan"}.get(nic.kind)
    uevent = f"INTERFACE={nic.name}\nIFINDEX={index + 1}"
    tree.file(f"{path}/uevent", f"DEVTYPE={device_type}\n{uevent}" if device_type else uevent)
    if nic.kind in {"bridge", "wireless"}:
        tree.file(f"{path}/{nic.kind}/.keep", "")
    if nic.kind == "bond":
        tree.file(f"{path}/bonding/mode", "balance-xor 2")
    if nic.kind == "tun":
        tree.file(f"{path}/tun_flags", "0x1002")
    if nic.pci:
        device = f"sys/devices/{nic.pci}"
        tree.file(f"{device}/net/{nic.name}/.keep", "")
        tree.link(f"{device}/driver", f"../../bus/pci/drivers/{nic.driver}")
        tree.link(f"{path}/device", f"../../../devices/{nic.pci}")


def _hca(tree: _Tree, nic: Nic, index: int) -> None:
    device, path = f"sys/class/infiniband/{nic.hca}", f"sys/class/infiniband/{nic.hca}/ports/1"
    is_up = nic.up if nic.hca_up is None else nic.hca_up
    tree.file(f"{path}/state", "4: ACTIVE" if is_up else "1: DOWN")
    tree.file(f"{path}/phys_state", "5: LinkUp" if is_up else "3: Disabled")
    tree.file(f"{path}/link_layer", nic.link_layer)
    # As mlx5 prints it for 100 Gb/s; a port that is down reads as this.
    tree.file(f"{path}/rate", "100 Gb/sec (4X EDR)" if is_up else "40 Gb/sec (4X QDR)")
    if nic.pci:
        tree.link(f"{device}/device", f"../../../devices/{nic.pci}")
    local = f"fe80:0000:0000:0000:4ebb:47ff:fe00:{index:04x}"
    table = {0: (local, "IB/RoCE v1"), 1: (local, "RoCE v2")}
    slot = nic.gid_start
    for address in nic.addresses if nic.up else ():
        packed = IPv4Interface(address).ip.packed
        gid = f"0000:0000:0000:0000:0000:ffff:{packed[:2].hex()}:{packed[2:].hex()}"
        table[slot], table[slot + 1] = (gid, "IB/RoCE v1"), (gid, "RoCE v2")
        slot += 2
    for slot in range(GID_SLOTS):
        gid, version = table.get(slot, (ZERO_GID, ""))
        tree.file(f"{path}/gids/{slot}", gid)
        if version:  # the kernel answers EINVAL for the others
            tree.file(f"{path}/gid_attrs/types/{slot}", version)
            tree.file(f"{path}/gid_attrs/ndevs/{slot}", nic.name)


def _routes(node: Node) -> str:
    rows = ["Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"]
    for nic in node.nics:
        for address in nic.addresses if nic.up and nic.kind != "loopback" else ():
            network = IPv4Interface(address).network
            if nic.name == node.default_route:
                gateway = _little_endian(network[1].packed)
                rows.append(f"{nic.name}\t00000000\t{gateway}\t0003\t0\t0\t100\t00000000\t0\t0\t0")
            target = _little_endian(network.network_address.packed)
            mask = _little_endian(network.netmask.packed)
            rows.append(f"{nic.name}\t{target}\t00000000\t0001\t0\t0\t0\t{mask}\t0\t0\t0")
    return "\n".join(rows)


def _little_endian(packed: bytes) -> str:
    return packed[::-1].hex().upper()


def _ip(node: Node) -> str:
    """As ip -o -4 addr show prints it."""
    rows = []
    for index, nic in enumerate(node.nics, 1):
        for address in nic.addresses:
            broadcast = IPv4Interface(address).network.broadcast_address
            rows.append(
                f"{index}: {nic.name}    inet {address} brd {broadcast} scope global {nic.name}"
                "\\       valid_lft forever preferred_lft forever"
            )
    return "\n".join(rows)


def _nvidia_smi(node: Node) -> str:
    return "\n".join(
        f"{index}, {node.gpu_name}, 580.95.05, {node.gpu_memory}" for index in range(node.gpus)
    )


def wanted(root: Path | str, **changes: Any) -> dict[str, Any]:
    """An argument for remote/probe.py that asks for nothing of this machine."""
    return {
        "root": str(root),
        "model": None,
        "containers": [],
        "label": "test",
        "ports": [],
        "interface": "",
        "meet": None,
        **changes,
    }


def run_probe(
    argument: dict[str, Any], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run remote/probe.py as a host does: its text over stdin."""
    text = files("cluster.remote").joinpath("probe.py").read_bytes()
    return subprocess.run(
        [sys.executable, "-", "probe", json.dumps(argument)],
        input=text,
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )


def probe_tree(root: Path, **changes: Any) -> dict[str, Any]:
    """What remote/probe.py says of a tree."""
    done = run_probe(wanted(root, **changes))
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stderr, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def read_tree(root: Path) -> dict[str, Any]:
    """The same in this process: quicker, for tests of what is made of it."""
    found: dict[str, Any] = json.loads(json.dumps(probe.probe(wanted(root))))
    return found
