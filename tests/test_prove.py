"""Prove, offline: what its program says of this machine, what its verdicts are, when it runs."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.proof import Cause, Report, Verdict, command, judge, read_nccl
from cluster.remote.prove import addresses, endpoint, tcp_table, used
from cluster.settings import Cluster
from tests.conftest import CLUSTERS, Pyinfra
from tests.fleet import FakeHost, Fleet

ROOT = Path(__file__).parent.parent

# Lines as NCCL 2.28.9 prints them, host, pid and thread aside.
BOOTSTRAP = "spark-1:71:71 [0] NCCL INFO Bootstrap: Using enp1s0f1np1:192.168.200.12<0>"
NO_DEVICE = "spark-1:71:90 [0] NCCL INFO NET/IB : No device found."
NO_DEVICE_BUT_USING = "NCCL INFO NET/IB : Using [RO]; OOB enp1s0f1np1:192.168.200.12<0>"
SOCKET = "NCCL INFO NET/Socket : Using [0]enp1s0f1np1:192.168.200.12<0>"
HALF = "NCCL INFO NET/Socket : Using [0]enP7s7:10.99.0.2<0> [1]enp1s0f1np1:192.168.200.12<0>"
VIA_SOCKET = "NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0"
VIA_IB = "NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0"
DEVICES = (
    "NCCL INFO NET/IB : Using [0]rocep1s0f1:1/RoCE [1]roceP2p1s0f1:1/RoCE [RO]; "
    "OOB enp1s0f1np1:192.168.200.12<0>"
)
QUEUE_PAIR = (
    "NCCL INFO NET/IB: NCCL Dev 0 IbDev 0 Port 1 qpn 1047 mtu 5 query_ece={supported=1, "
    "vendor_id=0x15b3, options=0x0, comp_mask=0x0} GID 3 (0/CC8A8C0FFFF0000) fifoRkey=0x15e6c5"
)
NO_INTERFACE = "[0] bootstrap.cc:114 NCCL WARN Bootstrap : no socket interface found"


def cluster(text: str = "") -> Cluster:
    """Two Sparks with both HCAs of their port; `text` is more of cluster.yaml."""
    values: dict[str, Any] = {
        "image": "i",
        "model": "m",
        "hosts": {
            f"spark-{n}": {
                "fabric": {
                    "address": f"192.168.200.{11 + n}/24",
                    "interface": "enp1s0f1np1",
                    "hcas": ["rocep1s0f1", "roceP2p1s0f1"],
                }
            }
            for n in (1, 2)
        },
    }
    values["hosts"]["spark-1"]["role"] = "head"

    def merge(into: dict[str, Any], other: dict[str, Any]) -> None:
        for key, value in other.items():
            if isinstance(value, dict) and isinstance(into.get(key), dict):
                merge(into[key], value)
            else:
                into[key] = value

    merge(values, yaml.safe_load(text) or {})
    return Cluster.model_validate(values)


def report(rank: int, environment: dict[str, str] | None = None, **changes: Any) -> Report:
    """A rank for which every layer goes over the fabric; `changes` are of layers."""
    address = f"192.168.200.{12 + rank}"
    values: dict[str, Any] = {
        layer: {"state": "ok", "addresses": [address]} for layer in ("ray", "c10d", "gloo", "queue")
    }
    lines = [line.replace("192.168.200.12", address) for line in (BOOTSTRAP, DEVICES, VIA_IB)]
    values["nccl"] = {"state": "ok", "busbw_gb_s": 22.4, "nccl_lines": [*lines, QUEUE_PAIR]}
    for layer, change in changes.items():
        values[layer] = {**values[layer], **change}
    derived = {
        "VLLM_HOST_IP": address,
        "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
        "NCCL_SOCKET_IFNAME": "enp1s0f1np1",
        "NCCL_IB_HCA": "rocep1s0f1,roceP2p1s0f1",
        "NCCL_IB_DISABLE": "0",
        "RAY_ADDRESS": "192.168.200.12:6379",
    }
    owned = {"lo": ["127.0.0.1"], "enp1s0f1np1": [address], "enP7s7": [f"10.99.0.{2 + rank}"]}
    actual = {key: v for key, v in {**derived, **(environment or {})}.items() if v != "(unset)"}
    return Report.model_validate(
        {
            **{"rank": rank, "hostname": f"spark-{rank + 1}", "addresses": owned},
            **{"environment": actual, "seconds": 3, "layers": values},
        }
    )


def verdicts(
    *reports: Report, text: str = "", absent: dict[str, Cause] | None = None
) -> dict[tuple[str, str], Verdict]:
    by_host = {f"spark-{each.rank + 1}": each for each in reports}
    found = judge(cluster(text), ["spark-1", "spark-2"], by_host, absent or {})
    return {(each.layer, each.host): each for each in found}


def test_all_is_well() -> None:
    found = verdicts(report(0), report(1))
    assert {each.state for each in found.values()} == {"ok"}
    assert {each.remedy for each in found.values()} == {""}
    assert found["gloo", "spark-2"].cell == "ok 192.168.200.13 enp1s0f1np1"
    assert found["nccl", "spark-1"].cell == "ok NET/IB rocep1s0f1 roceP2p1s0f1 GID 3 22.4 GB/s"


@pytest.mark.parametrize(
    ("lines", "transport", "devices", "sockets"),
    [
        ([BOOTSTRAP, NO_DEVICE, SOCKET, VIA_SOCKET], "Socket", [], 1),
        ([BOOTSTRAP, NO_DEVICE_BUT_USING, SOCKET, VIA_SOCKET], "Socket", [], 1),
        ([BOOTSTRAP, HALF, VIA_SOCKET], "Socket", [], 2),
        ([BOOTSTRAP, DEVICES, VIA_IB], "IB", ["rocep1s0f1:1", "roceP2p1s0f1:1"], 0),
        ([BOOTSTRAP, NO_DEVICE_BUT_USING], None, [], 0),
        (["NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA"], "IB", [], 0),
        (["garbage", ""], None, [], 0),
    ],
)
def test_nccl_says_its_transport(
    lines: list[str], transport: str | None, devices: list[str], sockets: int
) -> None:
    log = read_nccl(lines)
    assert (log.transport, log.devices, len(log.sockets)) == (transport, devices, sockets)


def test_nccl_says_more() -> None:
    log = read_nccl([BOOTSTRAP, HALF, QUEUE_PAIR, NO_INTERFACE])
    assert log.bootstrap == ("enp1s0f1np1", "192.168.200.12")
    assert log.sockets == [("enP7s7", "10.99.0.2"), ("enp1s0f1np1", "192.168.200.12")]
    assert log.gids == [3]
    assert log.warnings == ["Bootstrap : no socket interface found"]
    assert read_nccl([NO_DEVICE_BUT_USING]).bootstrap == ("enp1s0f1np1", "192.168.200.12")


REFUSED = "RuntimeError: connectFullMesh failed: Connection refused, remote=[127.0.1.1]:18856$0"
WAITS = "failed, and this one waits for it"


@pytest.mark.parametrize(
    ("layer", "text", "environment", "change", "found", "remedy"),
    [
        (
            "ray",
            "",
            {},
            {"addresses": ["10.99.0.3"]},
            "Ray knows this node as 10.99.0.3 (enP7s7), not as hosts.spark-2.fabric.address "
            "192.168.200.13",
            "start Ray on it with that address",
        ),
        (
            "ray",
            "",
            {},
            {"state": "failed", "reason": "no raylet runs in this container", "addresses": []},
            "no raylet runs",
            "start Ray on it",
        ),
        (
            "ray",
            "env: {RAY_ADDRESS: '10.99.0.2:6379'}",
            {"RAY_ADDRESS": "10.99.0.2:6379"},
            {"gcs": "10.99.0.2:6379"},
            "RAY_ADDRESS is 10.99.0.2:6379, from env",
            "delete env.RAY_ADDRESS in cluster.yaml",
        ),
        (
            "c10d",
            "",
            {},
            {"addresses": ["10.99.0.3"]},
            "it goes to 192.168.200.12 from 10.99.0.3 (enP7s7), not over the fabric",
            "ip route get 192.168.200.12",
        ),
        (
            "gloo",
            "hosts: {spark-2: {env: {GLOO_SOCKET_IFNAME: lo}}}",
            {"GLOO_SOCKET_IFNAME": "lo"},
            {"state": "failed", "reason": REFUSED, "addresses": ["127.0.0.1"]},
            "gloo listens on 127.0.0.1 (lo), not on the fabric: GLOO_SOCKET_IFNAME is lo, from "
            "hosts.spark-2.env",
            "delete hosts.spark-2.env.GLOO_SOCKET_IFNAME in cluster.yaml",
        ),
        (
            "gloo",
            "hosts: {spark-2: {env: {GLOO_SOCKET_IFNAME: lo}}}",
            {"GLOO_SOCKET_IFNAME": "lo"},
            {"state": "failed", "reason": REFUSED, "addresses": []},
            "gloo listens on 127.0.0.1, not on the fabric",
            "delete hosts.spark-2.env.GLOO_SOCKET_IFNAME in cluster.yaml",
        ),
        (
            "gloo",
            "env: {GLOO_SOCKET_IFNAME: null}",
            {"GLOO_SOCKET_IFNAME": "(unset)"},
            {"state": "failed", "reason": REFUSED, "addresses": ["127.0.1.1"]},
            "GLOO_SOCKET_IFNAME is not set: env removes it, and the hostname spark-2 resolves to "
            "127.0.1.1 (lo)",
            "delete env.GLOO_SOCKET_IFNAME: null",
        ),
        (
            "gloo",
            "env: {GLOO_SOCKET_IFNAME: null}",
            {"GLOO_SOCKET_IFNAME": "(unset)"},
            {"addresses": ["10.99.0.3"]},
            "the hostname spark-2 resolves to 10.99.0.3 (enP7s7)",
            "delete env.GLOO_SOCKET_IFNAME: null",
        ),
        (
            "gloo",
            "env: {GLOO_SOCKET_IFNAME: enp9}",
            {"GLOO_SOCKET_IFNAME": "enp9"},
            {"state": "failed", "reason": "Unable to find address for: enp9", "addresses": []},
            "GLOO_SOCKET_IFNAME is enp9, from env: no interface enp9 with an address here (it has "
            "lo 127.0.0.1, enp1s0f1np1 192.168.200.13, enP7s7 10.99.0.3)",
            "delete env.GLOO_SOCKET_IFNAME in cluster.yaml",
        ),
        (
            "queue",
            "hosts: {spark-2: {env: {VLLM_HOST_IP: 10.99.0.3}}}",
            {"VLLM_HOST_IP": "10.99.0.3"},
            {"addresses": ["10.99.0.3"]},
            "vLLM's queue is at 10.99.0.3 (enP7s7), not on the fabric: VLLM_HOST_IP is 10.99.0.3, "
            "from hosts.spark-2.env",
            "delete hosts.spark-2.env.VLLM_HOST_IP in cluster.yaml; then it is 192.168.200.13, "
            "derived from the hosts",
        ),
        (
            "queue",
            "hosts: {spark-2: {env: {VLLM_HOST_IP: null}}}",
            {"VLLM_HOST_IP": "(unset)"},
            {"addresses": ["0.0.0.0"]},
            "VLLM_HOST_IP is not set: hosts.spark-2.env removes it, so the default route decides",
            "delete hosts.spark-2.env.VLLM_HOST_IP: null",
        ),
        (
            "queue",
            "",
            {"VLLM_HOST_IP": "10.99.0.3"},
            {"addresses": ["10.99.0.3"]},
            "VLLM_HOST_IP is 10.99.0.3 in the container, though cluster.yaml gives 192.168.200.13",
            "the container on spark-2 is older than cluster.yaml",
        ),
        (
            "queue",
            "env: {VLLM_HOST_IP: 192.168.200.12}",
            {"VLLM_HOST_IP": "192.168.200.12"},
            {"state": "failed", "reason": "cannot listen", "addresses": ["192.168.200.12"]},
            "192.168.200.12 is not an address of this host",
            "delete env.VLLM_HOST_IP",
        ),
        (
            "nccl",
            "",
            {},
            {"state": "failed", "reason": "no GPU", "no_gpu": True},
            "torch sees no GPU in the container, and container.gpus is all",
            "NVIDIA container toolkit",
        ),
        (
            "nccl",
            "",
            {},
            {"state": "skipped", "reason": "no GPU"},
            "torch sees no GPU in the container, and container.gpus is all",
            "container.gpus: null is for hosts without",
        ),
        (
            "nccl",
            "env: {NCCL_SOCKET_IFNAME: enp9}",
            {"NCCL_SOCKET_IFNAME": "enp9"},
            {"state": "failed", "reason": "ncclInvalidUsage", "nccl_lines": [NO_INTERFACE]},
            "NCCL_SOCKET_IFNAME is enp9, from env: no such interface here",
            "delete env.NCCL_SOCKET_IFNAME in cluster.yaml",
        ),
        (
            "nccl",
            "env: {NCCL_SOCKET_IFNAME: null}",
            {"NCCL_SOCKET_IFNAME": "(unset)"},
            {
                "state": "hangs",
                "reason": "no end after 8 s",
                "nccl_lines": ["NCCL INFO Bootstrap: Using enP7s7:10.99.0.3<0>"],
            },
            "NCCL starts from enP7s7 10.99.0.3, not from the fabric: NCCL_SOCKET_IFNAME is not set",
            "delete env.NCCL_SOCKET_IFNAME: null",
        ),
        (
            "nccl",
            "hosts: {spark-2: {fabric: {hcas: []}}}\nenv: {NCCL_SOCKET_IFNAME: null}",
            {"NCCL_SOCKET_IFNAME": "(unset)"},
            {"nccl_lines": [BOOTSTRAP, HALF, VIA_SOCKET]},
            "NCCL sends one part in 2 of the tensors over enP7s7 10.99.0.2",
            "delete env.NCCL_SOCKET_IFNAME: null",
        ),
        (
            "nccl",
            "",
            {},
            {"nccl_lines": [BOOTSTRAP, NO_DEVICE, NO_DEVICE_BUT_USING, SOCKET, VIA_SOCKET]},
            "fell back to TCP, though hosts.spark-2.fabric.hcas promises RDMA over rocep1s0f1, "
            "roceP2p1s0f1",
            "/sys/class/infiniband of spark-2",
        ),
        (
            "nccl",
            "env: {NCCL_IB_DISABLE: 1}",
            {"NCCL_IB_DISABLE": "1"},
            {"nccl_lines": [BOOTSTRAP, SOCKET, VIA_SOCKET]},
            "fell back to TCP, though hosts.spark-2.fabric.hcas promises RDMA over rocep1s0f1, "
            "roceP2p1s0f1: NCCL_IB_DISABLE is 1, from env",
            "delete env.NCCL_IB_DISABLE in cluster.yaml",
        ),
        (
            "nccl",
            "env: {NCCL_NET: IB}",
            {"NCCL_NET": "IB"},
            {
                "state": "failed",
                "reason": "ncclSystemError",
                "nccl_lines": ["plugin/net.cc:379 NCCL WARN Failed to initialize any NET plugin"],
            },
            "NCCL finds no network, though hosts.spark-2.fabric.hcas promises RDMA",
            "/sys/class/infiniband of spark-2",
        ),
        (
            "nccl",
            "hosts: {spark-2: {fabric: {hcas: []}, env: {NCCL_NET: IB}}}",
            {"NCCL_NET": "IB", "NCCL_IB_DISABLE": "1"},
            {
                "state": "failed",
                "reason": "ncclSystemError",
                "nccl_lines": ["plugin/net.cc:379 NCCL WARN Failed to initialize any NET plugin"],
            },
            "NCCL finds no such network: NCCL_NET is IB, from hosts.spark-2.env",
            "delete hosts.spark-2.env.NCCL_NET in cluster.yaml",
        ),
        (
            "nccl",
            "",
            {},
            {"nccl_lines": [BOOTSTRAP, DEVICES.replace(" [1]roceP2p1s0f1:1/RoCE", ""), VIA_IB]},
            "NCCL does not use roceP2p1s0f1:1, which hosts.spark-2.fabric.hcas names",
            "half of the bandwidth is gone",
        ),
        (
            "nccl",
            "",
            {},
            {"nccl_lines": [BOOTSTRAP, DEVICES.replace(" [RO]", " [2]rocep1s0f10:1/RoCE"), VIA_IB]},
            "NCCL uses rocep1s0f10:1 too",
            "put = before the first one in env.NCCL_IB_HCA",
        ),
        (
            "nccl",
            "hosts: {spark-2: {fabric: {hcas: []}}}\nenv: {NCCL_IB_DISABLE: 0}",
            {"NCCL_IB_DISABLE": "0"},
            {},
            "tensors travel over RDMA, though hosts.spark-2.fabric.hcas is []: NCCL_IB_DISABLE is "
            "0, from env",
            "delete env.NCCL_IB_DISABLE",
        ),
        (
            "nccl",
            "",
            {},
            {
                "state": "failed",
                "reason": "ncclInvalidUsage",
                "nccl_lines": ["init.cc:904 NCCL WARN Duplicate GPU detected : rank 0 and rank 1"],
            },
            "Duplicate GPU detected",
            "give them different hostnames",
        ),
    ],
)
def test_the_host_with_the_cause_gets_the_remedy(
    layer: str,
    text: str,
    environment: dict[str, str],
    change: dict[str, Any],
    found: str,
    remedy: str,
) -> None:
    peer = {"state": "hangs", "reason": WAITS, "missing": [1]}
    everywhere = {
        key: value
        for key, value in environment.items()
        if key in cluster(text).env or key.startswith("NCCL_IB")
    }
    if "hcas: []" in text:
        everywhere["NCCL_IB_HCA"] = "(unset)"
        environment = {**environment, "NCCL_IB_HCA": "(unset)"}
    head = report(0, {k: v for k, v in everywhere.items() if not k.startswith("NCCL")})
    head = head.model_copy(
        update={"layers": {**head.layers, layer: head.layers[layer].model_copy(update=peer)}}
    )
    result = verdicts(head, report(1, environment, **{layer: change}), text=text)
    own = result[layer, "spark-2"]
    assert own.state in {"failed", "hangs"}
    assert found in own.found
    assert remedy in own.remedy
    if not cluster(text).env:
        assert result[layer, "spark-1"].found == f"spark-2 {WAITS}"
        assert result[layer, "spark-1"].remedy == "see spark-2"
        others = {each.state for key, each in result.items() if key[0] != layer}
        assert others == {"ok"}


def test_an_address_that_is_dialled_is_named_with_its_owner() -> None:
    change = {
        "state": "hangs",
        "reason": "no end after 8 s",
        "dialling": ["10.99.0.2:46459"],
    }
    own = verdicts(report(0), report(1, gloo=change))["gloo", "spark-2"]
    assert own.found == "no end after 8 s, dialling 10.99.0.2:46459 (spark-1's enP7s7)"


def test_a_port_that_is_dropped_on_the_fabric_is_a_firewall() -> None:
    change = {"state": "hangs", "reason": "no end", "dialling": ["192.168.200.12:46459"]}
    own = verdicts(report(0), report(1, gloo=change))["gloo", "spark-2"]
    assert "open all TCP ports of spark-1 (192.168.200.12) to spark-2" in own.remedy

    waits = {"state": "hangs", "reason": WAITS, "missing": [1]}
    both = verdicts(report(0, gloo=waits), report(1, gloo=change))
    assert both["gloo", "spark-1"].remedy == "see spark-2"


def test_a_hang_that_says_nothing_points_to_the_host_with_the_cause() -> None:
    hang = {"state": "hangs", "reason": "no end after 8 s", "complaints": ["timed out"]}
    loopback = {**hang, "addresses": ["127.0.0.1"]}
    own = verdicts(report(0, gloo=hang), report(1, gloo=loopback))["gloo", "spark-1"]
    assert (own.remedy, own.evidence) == ("see spark-2", ())


def test_a_failure_without_a_known_cause_shows_what_the_rank_said() -> None:
    change = {"state": "failed", "reason": "odd", "complaints": ["a", "E1130 really odd"]}
    own = verdicts(report(0), report(1, gloo=change))["gloo", "spark-2"]
    assert own.evidence == ("E1130 really odd",)
    assert "deadlines.prove" in own.remedy


def test_tcp_is_fine_where_no_rdma_is_promised() -> None:
    lines = {"nccl_lines": [BOOTSTRAP, NO_DEVICE, NO_DEVICE_BUT_USING, SOCKET, VIA_SOCKET]}
    unset = {"NCCL_IB_HCA": "(unset)", "NCCL_IB_DISABLE": "(unset)"}
    text = "hosts: {spark-1: {fabric: {hcas: null}}, spark-2: {fabric: {hcas: null}}}"
    found = verdicts(report(0, unset, nccl=lines), report(1, unset, nccl=lines), text=text)
    assert {each.state for each in found.values()} == {"ok"}
    assert found["nccl", "spark-1"].found == "NET/Socket 22.4 GB/s"


def test_the_latency_is_shown_beside_the_bandwidth() -> None:
    found = verdicts(report(0, nccl={"latency_us": 34}), report(1))
    assert found["nccl", "spark-1"].cell.endswith(" 22.4 GB/s 34 us")


@pytest.mark.parametrize(
    ("chosen", "is_absent"),
    [
        ("enp1s0f1np1", False),
        ("enp1", False),
        ("=enp1", True),
        ("=enp1s0f1np1", False),
        ("=enp9,enP7s7", False),
        ("enp9,enp8", True),
        ("^lo", False),
    ],
)
def test_an_interface_that_nccl_will_not_find(chosen: str, is_absent: bool) -> None:
    """NCCL tells one rank; the others see a lost connection."""
    lost = {"state": "hangs", "reason": WAITS, "missing": [0], "nccl_lines": []}
    own = verdicts(report(0), report(1, {"NCCL_SOCKET_IFNAME": chosen}, nccl=lost))
    assert ("no such interface here" in own["nccl", "spark-2"].found) == is_absent


@pytest.mark.parametrize(("chosen", "state"), [("mlx5_0", "failed"), ("^mlx5_0", "ok")])
def test_hcas_named_by_a_variable_are_a_promise_too(chosen: str, state: str) -> None:
    lines = {"nccl_lines": [BOOTSTRAP, NO_DEVICE, NO_DEVICE_BUT_USING, SOCKET, VIA_SOCKET]}
    text = f"""
        hosts: {{spark-1: {{fabric: {{hcas: null}}}}, spark-2: {{fabric: {{hcas: null}}}}}}
        env: {{NCCL_IB_HCA: {chosen}}}
    """
    environment = {"NCCL_IB_HCA": chosen, "NCCL_IB_DISABLE": "(unset)"}
    found = verdicts(report(0, environment), report(1, environment, nccl=lines), text=text)
    assert found["nccl", "spark-2"].state == state


def test_no_gpu_is_fine_where_none_is_asked_for() -> None:
    skipped = {"state": "skipped", "reason": "torch sees no GPU in this container"}
    found = verdicts(
        report(0, nccl=skipped), report(1, nccl=skipped), text="container: {gpus: null}"
    )
    assert found["nccl", "spark-1"].state == "skipped"


@pytest.mark.parametrize(("floor", "state"), [("null", "ok"), (20, "ok"), (23, "warning")])
def test_the_floor_of_the_bandwidth(floor: Any, state: str) -> None:
    found = verdicts(report(0), report(1), text=f"prove: {{nccl_floor: {floor}}}")
    assert found["nccl", "spark-1"].state == state
    assert ("below prove.nccl_floor" in found["nccl", "spark-1"].found) == (state == "warning")


def test_a_host_without_a_report_has_the_cause() -> None:
    change = {"state": "failed", "reason": "did not come within 20 s", "missing": [1]}
    cause = ("vllm-ray does not run here", "start Ray")
    found = verdicts(report(0, c10d=change), absent={"spark-2": cause})
    assert found["ray", "spark-2"].state == "failed"
    assert found["ray", "spark-2"].found == cause[0]
    assert found["gloo", "spark-2"].state == "not tried"
    assert found["c10d", "spark-1"].found == "spark-2 did not come within 20 s"
    assert found["c10d", "spark-1"].remedy == "see spark-2"


def test_a_rank_that_ended_early_failed_everywhere() -> None:
    broken = report(1).model_copy(update={"layers": {}, "error": "ImportError: no torch"})
    found = verdicts(report(0), broken)
    assert found["gloo", "spark-2"].state == "failed"
    assert "no torch" in found["gloo", "spark-2"].found


def test_the_command_without_ray_is_like_vllm_serves() -> None:
    words = command(
        cluster("executor: mp\ncontainer: {flags: [--init]}"), "spark-2", "i1", {"a": 1}
    )
    assert words[:4] == ["docker", "run", "--rm", "--name=vllm-prove"]
    for part in ("--network=host", "--gpus=all", "--device=/dev/infiniband", "--shm-size=16g"):
        assert part in words
    assert words[-6:] == ["--entrypoint=python3", "--init", "i1", "-", "prove", '{"a": 1}']


# The program


TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0CC8A8C0:8AE8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1
   1: 0DC8A8C0:9C40 B4E6010A:AD2B 02 00000001:00000000 01:00000064 00000000     0        0 12 1
   2: 0100007F:1F90 0100007F:9C41 06 00000000:00000000 03:00000064 00000000     0        0 0 3
"""
TCP6 = """\
  sl  local_address                         remote_address                        st ...
 0: 0000000000000000FFFF00000CC8A8C0:CB20 0000000000000000FFFF00000DC8A8C0:55F0 01 0:0 0:0 0 0 0 13
"""


def test_the_kernels_table_of_sockets() -> None:
    assert tcp_table(TCP) == [
        ("11", ("listen", "192.168.200.12", 35560, "0.0.0.0", 0)),
        ("12", ("syn-sent", "192.168.200.13", 40000, "10.1.230.180", 44331)),
    ]
    assert tcp_table(TCP6) == [
        ("13", ("established", "192.168.200.12", 52000, "192.168.200.13", 22000)),
    ]
    assert endpoint("00000000000000000000000001000000:0050") == ("::1", 80)


def test_a_connection_with_the_store_is_not_the_layers_own() -> None:
    rows = [
        ("established", "192.168.200.12", 52000, "192.168.200.13", 22000),
        ("listen", "127.0.1.1", 40000, "0.0.0.0", 0),
        ("listen", "0.0.0.0", 40001, "0.0.0.0", 0),
        ("syn-sent", "10.1.230.180", 40002, "10.9.9.9", 1),
        ("listen", "127.0.0.1", 28028, "0.0.0.0", 0),
    ]
    assert used(rows, 22000, of_store=False) == ["127.0.1.1"]
    assert used(rows, 22000, of_store=True) == ["192.168.200.12"]


def test_addresses_need_no_program() -> None:
    assert addresses()["lo"] == ["127.0.0.1"]


CHILDREN = """
import json, os, socket, sys, time
from cluster.remote import prove

def good(wanted):
    yield
    return {"addresses": ["a"]}

def raises(wanted):
    yield
    raise RuntimeError("odd\\nException raised from x")

def no_import(wanted):
    import no_such_module
    yield

def dies(wanted):
    yield
    print("Unable to go on", file=sys.stderr)
    os.abort()

def dials(wanted):
    yield
    socket.create_connection(("127.0.0.1", wanted["port"]))

wanted = {"rank": 0, "world": 1, "seconds": 1, "port": int(sys.argv[1])}
layers = dict(good=good, raises=raises, no_import=no_import, dies=dies, dials=dials)
prover = prove.Prover(wanted, layers)
for child in prover.children.values():
    prover.prepare(child)
    child.go(1)
prover.follow(list(prover.children.values()))
for name, child in prover.children.items():
    child.result["complaints"] = child.complaints()
    child.kill()
print(json.dumps({name: child.result for name, child in prover.children.items()}))
"""


def test_a_layer_that_hangs_is_named_with_what_it_dials() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(3)]  # the kernel drops what comes after them
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(CHILDREN), str(port)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        for each in waiting:
            each.close()
    result = json.loads(done.stdout)
    assert result["good"]["state"] == "ok"
    assert result["raises"]["reason"] == "RuntimeError: odd"
    assert "no_such_module" in result["no_import"]["reason"]
    assert result["dies"]["reason"] == "its process died (signal 6)"
    assert result["dies"]["complaints"] == ["Unable to go on"]
    assert result["dials"]["state"] == "hangs"
    assert result["dials"]["dialling"] == [f"127.0.0.1:{port}"]
    assert result["dials"]["seconds"] < 2


# The operations


def broken(fleet: Fleet, name: str, layer: str, **result: Any) -> None:
    """Have a layer of a fake host fail."""
    answer = FakeHost.proof

    def proof(wanted: dict[str, Any]) -> dict[str, Any]:
        found = answer(fleet[name], wanted)
        found["layers"][layer].update(result)
        return found

    fleet[name].proof = proof  # type: ignore[method-assign]


def test_a_layer_off_the_fabric_stops_the_deploy_before_vllm_starts(
    run: Pyinfra, fleet: Fleet
) -> None:
    broken(fleet, "spark-2", "queue", addresses=["10.1.230.180"])
    result = run("-y", "deploy.py")
    assert result.exit_code == 1
    assert "vLLM's queue is at 10.1.230.180" in result.output
    assert "prove: queue: see above" in result.output
    assert fleet["spark-1"].starts == ["vllm-ray"]


def test_all_ranks_get_the_same_meeting_place(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    result = run("-y", "tasks/prove.py")
    assert result.exit_code == 0, result.output
    wanted = {}
    for name, commands in result.commands.items():
        words = next(part for part in commands if " - prove " in part)
        assert words.startswith("docker exec -i vllm-ray python3 - prove ")
        wanted[name] = json.loads(words.partition(" prove ")[2].strip("'"))
    assert [wanted[name].pop("rank") for name in ("spark-1", "spark-2")] == [0, 1]
    assert wanted["spark-1"] == wanted["spark-2"]
    assert wanted["spark-1"]["head"] == "192.168.200.12"
    assert "ok 192.168.200.13" in result.output


def test_alone_it_proves_and_in_a_rerun_it_does_not(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    again = run("-y", "deploy.py")
    assert not any("- prove" in part for parts in again.commands.values() for part in parts)
    alone = run("-y", "tasks/prove.py")
    assert any("prove" in part for part in alone.commands["spark-1"])


def test_json_is_all_of_stdout(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    result = run("-y", "tasks/prove.py", "--data", "json=true")
    line = next(line for line in result.output.splitlines() if line.startswith("[{"))
    assert {each["state"] for each in json.loads(line)} == {"ok"}


def test_without_ray_on_a_host_it_says_so(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    fleet["spark-2"].running.clear()
    result = run("-y", "tasks/prove.py")
    assert result.exit_code == 1
    assert "vllm-ray does not run here" in result.output


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": {"gloo": {"state": "odd"}}}, "its answer is not usable: layers.gloo.state"),
        ({"addresses": None}, "its answer is not usable: addresses"),
        ({"layers": {}, "error": "ImportError: torch"}, "ImportError: torch"),
    ],
)
def test_a_garbled_answer_is_a_finding(
    run: Pyinfra, fleet: Fleet, changes: dict[str, Any], says: str
) -> None:
    run("-y", "deploy.py")
    fleet["spark-2"].proof_changes = changes
    result = run("-y", "tasks/prove.py")
    assert result.exit_code == 1
    assert says in result.output
    assert "Traceback" not in result.output


def test_a_program_that_does_not_run_is_a_finding(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    fleet["spark-2"].failures["- prove"] = "OCI runtime exec failed"
    result = run("-y", "tasks/prove.py")
    assert result.exit_code == 1
    assert "the program did not run" in result.output
    assert "Traceback" not in result.output


def test_one_host_has_nothing_to_prove(run: Pyinfra, fleet: Fleet) -> None:
    result = run("-y", "deploy.py", cluster=CLUSTERS / "one-host.yaml")
    assert result.exit_code == 0, result.output
    assert not any("- prove" in part for parts in result.commands.values() for part in parts)


def test_without_ray_it_has_a_container_of_its_own(run: Pyinfra, fleet: Fleet) -> None:
    result = run("-y", "deploy.py", cluster=CLUSTERS / "no-ray.yaml")
    assert result.exit_code == 0, result.output
    proofs = [part for part in result.commands["spark-2"] if "--name=vllm-prove" in part]
    assert len(proofs) == 1


def test_four_hosts_are_shown_row_by_row(
    run: Pyinfra, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_RAY_TOKEN", "x")
    monkeypatch.setenv("TEST_API_KEY", "y")
    result = run("-y", "deploy.py", cluster=CLUSTERS / "four-hosts.yaml")
    assert result.exit_code == 0, result.output
    assert re.search(r"^queue +@fake/node-c +ok 10.\S+ \S+ *$", result.output, re.MULTILINE)
