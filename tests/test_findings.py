"""Preflight's rules: each fires on its fault, and keeps silent on a cluster where all is well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cluster.findings import Finding, Situation, judge, rules, same_port
from cluster.load import ClusterFileError, load
from cluster.probe import Probe
from cluster.settings import Cluster
from tests import trees

ROOT = Path(__file__).parent.parent
SPARKS = load(ROOT / "group_data" / "examples" / "two-sparks.yaml")
GIB = 2**30
ADDRESSES = {"spark-1": "192.168.200.12", "spark-2": "192.168.200.13"}


def gid(index: int, ipv4: str | None, kind: str = "RoCE v2") -> dict[str, Any]:
    return {"index": index, "gid": "x", "ipv4": ipv4, "type": kind}


def spark(name: str) -> dict[str, Any]:
    """A DGX Spark whose port 1 is cabled, as remote/probe.py describes it."""
    address = ADDRESSES[name]
    twin = address.replace("200.", "201.")
    peer = "spark-2" if name == "spark-1" else "spark-1"

    def interface(label: str, owned: list[str], carrier: bool = True) -> dict[str, Any]:
        return {
            "name": label,
            "kind": "physical",
            "mtu": 9000,
            "carrier": carrier,
            "addresses": owned,
        }

    def hca(label: str, port_interface: str, ipv4: str) -> dict[str, Any]:
        return {
            "name": label,
            "port": 1,
            "state": "ACTIVE",
            "link_layer": "Ethernet",
            "interfaces": [port_interface],
            "gids": [gid(0, None, "IB/RoCE v1"), gid(1, None), gid(3, ipv4)],
        }

    return {
        "hostname": name,
        "hostname_addresses": ["127.0.1.1"],
        "kernel": "6.14.0-1013-nvidia",
        "product": "NVIDIA_DGX_Spark",
        "interfaces": [
            interface("lo", ["127.0.0.1/8"]),
            interface("enp1s0f1np1", [f"{address}/24"]),
            interface("enP2p1s0f1np1", [f"{twin}/24"]),
            interface("enp1s0f0np0", [], carrier=False),
        ],
        "hcas": [
            hca("rocep1s0f1", "enp1s0f1np1", address),
            hca("roceP2p1s0f1", "enP2p1s0f1np1", twin),
            {"name": "rocep1s0f0", "port": 1, "state": "DOWN", "interfaces": ["enp1s0f0np0"]},
        ],
        "infiniband_devices": True,
        "memory": {"MemTotal": 121 * GIB, "MemAvailable": 115 * GIB, "MemFree": 110 * GIB},
        "gpus": [{"index": 0, "name": "NVIDIA GB10", "driver": "580.95.05"}],
        "docker": {"error": None, "root": "/var/lib/docker", "runtimes": ["nvidia", "runc"]},
        "docker_space": {"path": "/var/lib/docker", "exists": True, "free_bytes": 10**12},
        "meeting": {"failures": [], "frames": {peer: True}},
        "time": 1000.0,
    }


def sparks() -> dict[str, dict[str, Any]]:
    return {name: spark(name) for name in ADDRESSES}


def variant(cluster: Cluster = SPARKS, **changes: Any) -> Cluster:
    """The cluster with values changed; keys joined by "__"."""
    values = cluster.model_dump(mode="json", exclude_none=True)
    for path, value in changes.items():
        section = values
        *parents, last = path.replace("spark_", "spark-").split("__")
        for key in parents:
            section = section.setdefault(key, {})
        section[last] = value
    return Cluster.model_validate(values)


def find(
    probes: dict[str, dict[str, Any]],
    cluster: Cluster = SPARKS,
    failed: dict[str, str] | None = None,
) -> list[Finding]:
    typed = {name: Probe.model_validate(probe) for name, probe in probes.items()}
    return judge(Situation(cluster, typed, failed or {}))


def interface_of(probe: dict[str, Any], name: str = "enp1s0f1np1") -> dict[str, Any]:
    return next(each for each in probe["interfaces"] if each["name"] == name)


def unreached(
    probes: dict[str, Any], name: str, ports: list[int], error: str = "no answer"
) -> None:
    peer = "spark-2" if name == "spark-1" else "spark-1"
    probes[name]["meeting"] = {
        "failures": [{"peer": peer, "port": port, "error": error} for port in ports],
        "frames": {peer: True},
    }


ALL_PORTS = [6379, 100, 8000, 40000, 50000]


def wrong_interface(probes: dict[str, Any]) -> None:
    interface_of(probes["spark-2"])["addresses"] = []


def other_prefix(probes: dict[str, Any]) -> None:
    interface_of(probes["spark-2"])["addresses"] = ["192.168.200.13/16"]


def no_carrier(probes: dict[str, Any]) -> None:
    interface_of(probes["spark-2"])["carrier"] = False


def mtu_reset(probes: dict[str, Any]) -> None:
    interface_of(probes["spark-2"])["mtu"] = 1500


def frames_lost(probes: dict[str, Any]) -> None:
    probes["spark-1"]["meeting"]["frames"] = {"spark-2": False}


def firewalled(probes: dict[str, Any]) -> None:
    unreached(probes, "spark-1", ALL_PORTS[1:])


def one_way(probes: dict[str, Any]) -> None:
    unreached(probes, "spark-1", ALL_PORTS)


def cut(probes: dict[str, Any]) -> None:
    unreached(probes, "spark-1", ALL_PORTS, "EHOSTUNREACH")
    unreached(probes, "spark-2", ALL_PORTS, "EHOSTUNREACH")


def set_in(host: str, **values: Any) -> Any:
    def change(probes: dict[str, Any]) -> None:
        probes[host].update(values)

    return change


def hca_state(probes: dict[str, Any]) -> None:
    probes["spark-2"]["hcas"][1]["state"] = "DOWN"


def no_gid(probes: dict[str, Any]) -> None:
    probes["spark-2"]["hcas"][0]["gids"] = [gid(0, None, "IB/RoCE v1"), gid(1, None)]


def gid_drift(probes: dict[str, Any]) -> None:
    probes["spark-2"]["hcas"][0]["gids"][2]["index"] = 4


def one_subnet(probes: dict[str, Any]) -> None:
    interface_of(probes["spark-2"], "enP2p1s0f1np1")["addresses"] = ["192.168.200.113/24"]


# id: (what is wrong, changes of cluster.yaml, host, what has to be said)
FIRING: list[tuple[str, Any, dict[str, Any], str, str]] = [
    ("fabric-address", wrong_interface, {}, "spark-2", "correct hosts.spark-2.fabric"),
    ("fabric-subnet", other_prefix, {}, "spark-2", "192.168.200.13/16"),
    ("fabric-carrier", no_carrier, {}, "spark-2", "ip link set enp1s0f1np1 up"),
    ("fabric-mtu", mtu_reset, {}, "spark-2", "mtu 9000 on spark-2"),
    ("rdma-mtu", mtu_reset, {}, "spark-2", "MTU 1500"),
    ("fabric-frame", frames_lost, {}, "spark-1", "9000 bytes does not arrive at spark-2"),
    ("fabric-firewall", firewalled, {}, "spark-1", "100, 8000, 40000, 50000"),
    ("fabric-firewall", one_way, {}, "spark-1", "the other direction works"),
    ("fabric-unreachable", cut, {}, "spark-1", "EHOSTUNREACH"),
    ("gloo-hostname", None, {"env": {"GLOO_SOCKET_IFNAME": None}}, "spark-1", "127.0.1.1"),
    (
        "port-taken",
        set_in("spark-1", listeners=[{"port": 6379, "pid": 7, "program": "redis-server"}]),
        {},
        "spark-1",
        "redis-server (pid 7)",
    ),
    (
        "container-name",
        set_in("spark-2", containers=[{"name": "vllm-ray", "ours": False, "running": True}]),
        {},
        "spark-2",
        "docker rename vllm-ray",
    ),
    (
        "leftover-process",
        set_in("spark-2", processes=[{"pid": 9, "command": "raylet --x"}] * 3),
        {},
        "spark-2",
        "pid 9 raylet --x and 2 more",
    ),
    (
        "ray-token",
        set_in("spark-1", auth_token=True),
        {"env": {"RAY_AUTH_MODE": None}},
        "spark-1",
        "RAY_AUTH_MODE",
    ),
    (
        "docker-down",
        set_in("spark-2", docker={"error": "permission denied"}),
        {},
        "spark-2",
        "permission denied",
    ),
    (
        "gpu-runtime",
        set_in("spark-2", docker={"error": None, "runtimes": ["runc"]}),
        {},
        "spark-2",
        "nvidia-ctk",
    ),
    ("gpu-count", None, {"hosts__spark_2__gpus": 2}, "spark-2", "set hosts.spark-2.gpus: 1"),
    ("gpu-count", set_in("spark-2", gpus=[]), {}, "spark-2", "container.gpus: null"),
    ("infiniband-devices", set_in("spark-2", infiniband_devices=False), {}, "spark-2", "uverbs"),
    ("memlock", None, {"container": {"ulimits": {}}}, "spark-1", "memlock: -1"),
    (
        "hca-missing",
        None,
        {"hosts__spark_2__fabric__hcas": ["mlx5_0"]},
        "spark-2",
        "this host has roceP2p1s0f1, rocep1s0f0, rocep1s0f1",
    ),
    ("hca-down", hca_state, {}, "spark-2", "roceP2p1s0f1 is DOWN"),
    (
        "hca-other-link",
        lambda probes: probes["spark-2"]["hcas"][2].update(state="ACTIVE"),
        {"hosts__spark_2__fabric__hcas": ["rocep1s0f0"]},
        "spark-2",
        "rocep1s0f1, roceP2p1s0f1",
    ),
    ("hca-gid", no_gid, {}, "spark-2", "RoCEv2"),
    ("gid-pinned", gid_drift, {"env": {"NCCL_IB_GID_INDEX": "3"}}, "spark-2", "index is 4"),
    ("gid-pinned", None, {"env": {"NCCL_IB_GID_INDEX": ""}}, "spark-1", "reads as 0"),
    ("twins-one-subnet", one_subnet, {}, "spark-2", "both in 192.168.200.0/24"),
    ("clock-skew", set_in("spark-2", time=1100.0), {}, "spark-2", "100 s ahead of spark-1"),
    (
        "disk-docker",
        set_in("spark-2", docker_space={"path": "/d", "exists": True, "free_bytes": 10**9}),
        {},
        "spark-2",
        "1.0 GB free",
    ),
    (
        "disk-docker-low",
        set_in("spark-2", docker_space={"path": "/d", "exists": True, "free_bytes": 2 * 10**10}),
        {},
        "spark-2",
        "20.0 GB free",
    ),
    (
        "model-missing",
        set_in("spark-2", model={"path": "/m", "exists": False, "free_bytes": 1}),
        {"model": {"name": "/m", "relay": False}},
        "spark-2",
        "there is no /m",
    ),
    (
        "memory-short",
        set_in("spark-2", memory={"MemTotal": 121 * GIB, "MemAvailable": 60 * GIB}),
        {},
        "spark-2",
        "gpu_memory_utilization: 0.49 or less",
    ),
    (
        "memory-cached",
        set_in(
            "spark-2",
            memory={
                "MemTotal": 121 * GIB,
                "MemAvailable": 110 * GIB,
                "MemFree": 20 * GIB,
                "Cached": 90 * GIB,
            },
        ),
        {},
        "spark-2",
        "drop_caches",
    ),
    ("known-bad", set_in("spark-1", kernel="6.17.0-1003-nvidia"), {}, "spark-1", "combining"),
    (
        "known-bad",
        set_in("spark-1", gpus=[{"index": 0, "name": "NVIDIA GB10", "driver": "590.1"}]),
        {},
        "spark-1",
        "driver 580",
    ),
]


@pytest.mark.parametrize(
    ("rule", "change", "settings", "host", "says"),
    FIRING,
    ids=[f"{row[0]}-{index}" for index, row in enumerate(FIRING)],
)
def test_a_rule_fires_on_its_fault(
    rule: str, change: Any, settings: dict[str, Any], host: str, says: str
) -> None:
    probes = sparks()
    if change:
        change(probes)
    found = [each for each in find(probes, variant(**settings)) if each.id == rule]
    assert host in [each.host for each in found]
    assert says in " ".join(f"{each.found} {each.remedy}" for each in found)


def test_all_rules_are_silent_on_two_good_sparks() -> None:
    assert find(sparks()) == []


def test_every_rule_has_a_test_and_a_source() -> None:
    assert {row[0] for row in FIRING} | {"probe-failed"} == set(rules())
    for rule in rules().values():
        assert set(rule) == {"severity", "why", "source"}
        assert rule["severity"] in {"error", "warning"}


def test_a_host_that_could_not_be_probed_is_a_finding() -> None:
    probes = sparks()
    del probes["spark-2"]
    unreached(probes, "spark-1", ALL_PORTS)
    found = find(probes, failed={"spark-2": "python3: not found"})
    assert [(each.id, each.host) for each in found] == [("probe-failed", "spark-2")]


def test_errors_come_first_within_a_host() -> None:
    probes = sparks()
    mtu_reset(probes)
    probes["spark-2"]["time"] = 0
    found = find(probes)
    assert [each.id for each in found] == ["fabric-mtu", "clock-skew", "rdma-mtu"]


def test_a_running_deployment_is_no_shortage_of_memory() -> None:
    probes = sparks()
    probes["spark-2"]["memory"] = {"MemTotal": 121 * GIB, "MemAvailable": 10 * GIB}
    probes["spark-2"]["containers"] = [{"name": "vllm-ray", "ours": True, "running": True}]
    assert find(probes) == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("enp1s0f1np1", "enP2p1s0f1np1", True),
        ("enp1s0f1np1", "enp1s0f1np1", True),
        ("enp1s0f0np0", "enP2p1s0f1np1", False),
        ("enp1s0f1np1", "eth1", False),
        ("ens1f0", "ens2f0", False),
        ("enP6p3s0f0np0", "enP22p3s0f0np0", False),
        ("eth0", "eth1", False),
    ],
)
def test_twins_are_known(one: str, other: str, same: bool) -> None:
    assert same_port(one, other) is same


def test_an_unknown_id_cannot_be_silenced(tmp_path: Path) -> None:
    text = (ROOT / "tests" / "clusters" / "two-hosts.yaml").read_text(encoding="utf-8")
    path = tmp_path / "cluster.yaml"
    path.write_text(text + "silence: {clock-skw: we know}\n", encoding="utf-8")
    with pytest.raises(ClusterFileError, match=re.escape('Did you mean "clock-skew"?')):
        load(path)


SCENARIOS: list[tuple[str, dict[str, Any], set[tuple[str, str]]]] = [
    ("direct", {}, set()),
    ("dual_cable", {}, set()),
    ("switch", {}, set()),
    ("no_default_route", {}, set()),
    ("worker_without_office", {}, set()),
    ("half_up", {}, {("spark-2", "hca-down")}),
    ("gid_drift", {}, set()),
    ("gid_drift", {"env": {"NCCL_IB_GID_INDEX": "3"}}, {("spark-2", "gid-pinned")}),
    ("mtu_reset", {}, {("spark-2", "fabric-mtu"), ("spark-2", "rdma-mtu")}),
    (
        "twins_one_subnet",
        {},
        {("spark-1", "twins-one-subnet"), ("spark-2", "twins-one-subnet")},
    ),
    ("ring", {}, {("spark-1", "fabric-address"), ("spark-2", "fabric-address")}),
]


@pytest.mark.parametrize(
    ("scenario", "settings", "expected"), SCENARIOS, ids=[f"{row[0]}-{row[1]}" for row in SCENARIOS]
)
def test_rules_over_hosts_that_were_really_probed(
    scenario: str, settings: dict[str, Any], expected: set[tuple[str, str]], tmp_path: Path
) -> None:
    """The probe runs on a tree of files as on a host; no part of its answer is written by hand."""
    roots = trees.build(tmp_path, trees.SCENARIOS[scenario]())
    probes = {name: trees.probe_tree(root) for name, root in roots.items() if name in ADDRESSES}
    found = {(each.host, each.id) for each in find(probes, variant(**settings))}
    assert ("spark-1", "memory-cached") in found  # every tree's page cache is full
    assert {each for each in found if each[1] != "memory-cached"} == expected


def test_hosts_without_rdma_that_were_really_probed(tmp_path: Path) -> None:
    roots = trees.build(tmp_path, trees.SCENARIOS["no_roce"]())
    names = dict(zip(roots, ADDRESSES, strict=False))
    probes = {names[name]: trees.probe_tree(root) for name, root in roots.items() if name in names}
    found = {each.id for each in find(probes)}
    assert {"fabric-address", "hca-missing", "infiniband-devices"} & found
