"""Verdicts over what prove's ranks said on a real GPU: an H200 shared by two network namespaces.

NCCL 2.28.9, torch 2.11, vLLM 0.26, Ray 2.56.1; a fabric and a management network with the default
route. logs/gpu/CASE-HOST.json is the last line of remote/prove.py's output, tests/gpu/cases.py says
what was different in cluster.yaml. GPU_REPORTS=FOLDER judges the reports of another run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.proof import BAD, Verdict
from tests.gpu import cases
from tests.gpu.cases import Case
from tests.gpu.verdicts import verdicts

REPORTS = Path(os.environ.get("GPU_REPORTS") or Path(__file__).parent / "logs" / "gpu")
CASES = {case.name: case for case in (*cases.PROVE, *cases.PROVE_RAY)}
HOSTS = ("spark-1", "spark-2")
NO_MORE_SECONDS = 30
FABRIC = "enp1s0f1np1"
DERIVED = f"; then it is {FABRIC}, derived from the hosts"

Said = tuple[str, str, str]
"""(host, part of what was found, part of the remedy)"""

# The layer that fails, and what is said of it on which host. Everywhere else: ok.
EXPECTED: dict[str, tuple[str, list[Said]]] = {
    "nccl-unset": (
        "nccl",
        [
            (
                "spark-1",
                "NCCL starts from enP7s7 10.99.0.2, not from the fabric: NCCL_SOCKET_IFNAME is not "
                "set: env removes it",
                f"delete env.NCCL_SOCKET_IFNAME: null in cluster.yaml{DERIVED}",
            ),
            (
                "spark-2",
                "NCCL starts from enP7s7 10.98.0.2, not from the fabric",
                "delete env.NCCL_SOCKET_IFNAME: null in cluster.yaml",
            ),
            ("spark-2", "dialling 10.99.0.2:", ""),
            ("spark-2", "(spark-1's enP7s7)", ""),
        ],
    ),
    "nccl-other-on-worker": (
        "nccl",
        [
            ("spark-1", "(spark-2's enP7s7)", "see spark-2"),
            (
                "spark-2",
                "NCCL starts from enP7s7 10.98.0.2, not from the fabric: NCCL_SOCKET_IFNAME is "
                "enP7s7, from hosts.spark-2.env",
                f"delete hosts.spark-2.env.NCCL_SOCKET_IFNAME in cluster.yaml{DERIVED}",
            ),
        ],
    ),
    "nccl-other-on-head": (
        "nccl",
        [
            (
                "spark-1",
                "NCCL starts from enP7s7 10.99.0.2, not from the fabric: NCCL_SOCKET_IFNAME is "
                "enP7s7, from hosts.spark-1.env",
                "delete hosts.spark-1.env.NCCL_SOCKET_IFNAME in cluster.yaml",
            ),
            ("spark-2", "(spark-1's enP7s7)", "see spark-1"),
        ],
    ),
    "nccl-loopback": (
        "nccl",
        [
            (host, "NCCL starts from lo 127.0.0.1", "delete env.NCCL_SOCKET_IFNAME in cluster.yaml")
            for host in HOSTS
        ],
    ),
    "nccl-absent": (
        "nccl",
        # Only rank 0 hears of it from NCCL; torch tells the other a lost connection.
        [
            (
                host,
                "NCCL_SOCKET_IFNAME is enp1s0f0np0, from env: no such interface here (it has lo "
                "127.0.0.1, enP7s7 ",
                f"delete env.NCCL_SOCKET_IFNAME in cluster.yaml{DERIVED}",
            )
            for host in HOSTS
        ],
    ),
    "nccl-net-ib": (
        "nccl",
        [
            (
                host,
                "NCCL finds no such network: NCCL_NET is IB, from env",
                "delete env.NCCL_NET in cluster.yaml",
            )
            for host in HOSTS
        ],
    ),
    "nccl-same-host": (
        "nccl",
        [
            (
                host,
                "NCCL takes two hosts for one: NCCL_HOSTID is same, from env",
                "delete env.NCCL_HOSTID in cluster.yaml",
            )
            for host in HOSTS
        ],
    ),
    "hca-absent": (
        "nccl",
        [
            (
                host,
                f"fell back to TCP, though hosts.{host}.fabric.hcas promises RDMA over rocep1s0f1",
                f"are these the names in /sys/class/infiniband of {host}",
            )
            for host in HOSTS
        ],
    ),
    "hca-by-env": (
        "nccl",
        [
            (
                host,
                "fell back to TCP: NCCL_IB_HCA is rocep1s0f1, from env, and NCCL found no such",
                f"delete env.NCCL_IB_HCA in cluster.yaml; is it in /sys/class/infiniband of {host}",
            )
            for host in HOSTS
        ],
    ),
    "gloo-unset": (
        "gloo",
        [
            (
                host,
                "GLOO_SOCKET_IFNAME is not set: env removes it",
                f"delete env.GLOO_SOCKET_IFNAME: null in cluster.yaml{DERIVED}",
            )
            for host in HOSTS
        ]
        + [("spark-2", "the hostname spark-2 resolves to 127.0.1.1 (lo)", "")],
    ),
    "gloo-unset-on-worker": (
        "gloo",
        [
            ("spark-1", "Connection refused, remote=[127.0.1.1]", "see spark-2"),
            (
                "spark-2",
                "GLOO_SOCKET_IFNAME is not set: hosts.spark-2.env removes it, and the hostname "
                "spark-2 resolves to 127.0.1.1 (lo)",
                f"delete hosts.spark-2.env.GLOO_SOCKET_IFNAME: null in cluster.yaml{DERIVED}",
            ),
        ],
    ),
    "gloo-absent": (
        "gloo",
        [
            (
                host,
                "GLOO_SOCKET_IFNAME is enp1s0f0np0, from env: no interface enp1s0f0np0 with an "
                "address here (it has lo 127.0.0.1, enP7s7 ",
                f"delete env.GLOO_SOCKET_IFNAME in cluster.yaml{DERIVED}",
            )
            for host in HOSTS
        ],
    ),
    "gloo-other": (
        "gloo",
        [
            (
                "spark-1",
                "gloo listens on 10.99.0.2 (enP7s7), not on the fabric: GLOO_SOCKET_IFNAME is "
                "enP7s7, from env",
                f"delete env.GLOO_SOCKET_IFNAME in cluster.yaml{DERIVED}",
            ),
            ("spark-2", "gloo listens on 10.98.0.2 (enP7s7)", "delete env.GLOO_SOCKET_IFNAME"),
        ],
    ),
    "host-ip-unset": (
        "queue",
        [
            (
                "spark-1",
                "vLLM's queue is at 10.99.0.2 (enP7s7), not on the fabric: VLLM_HOST_IP is not "
                "set: env removes it, so the default route decides",
                "delete env.VLLM_HOST_IP: null in cluster.yaml; then it is 192.168.200.12",
            ),
            (
                "spark-2",
                "vLLM's queue is at 10.98.0.2 (enP7s7), not on the fabric",
                "delete env.VLLM_HOST_IP: null in cluster.yaml; then it is 192.168.200.13",
            ),
        ],
    ),
    "host-ip-unset-on-worker": (
        "queue",
        [
            ("spark-1", "spark-2 does not answer at 10.98.0.2:", "see spark-2"),
            (
                "spark-2",
                "vLLM's queue is at 10.98.0.2 (enP7s7), not on the fabric: VLLM_HOST_IP is not "
                "set: hosts.spark-2.env removes it",
                "delete hosts.spark-2.env.VLLM_HOST_IP: null in cluster.yaml",
            ),
        ],
    ),
    "nccl-unset-routed": (
        "nccl",
        # It works, at half of the speed: nothing else would ever say so.
        [
            (
                "spark-1",
                "NCCL sends one part in 2 of the tensors over enP7s7 10.99.0.2",
                f"delete env.NCCL_SOCKET_IFNAME: null in cluster.yaml{DERIVED}",
            ),
            (
                "spark-2",
                "NCCL sends one part in 2 of the tensors over enP7s7 10.98.0.2",
                "delete env.NCCL_SOCKET_IFNAME: null in cluster.yaml",
            ),
        ],
    ),
    "host-ip-unset-routed": (
        "queue",
        [
            ("spark-1", "vLLM's queue is at 10.99.0.2 (enP7s7)", "delete env.VLLM_HOST_IP: null"),
            ("spark-2", "vLLM's queue is at 10.98.0.2 (enP7s7)", "delete env.VLLM_HOST_IP: null"),
        ],
    ),
    "ray-without-address": (
        "ray",
        [
            (
                "spark-1",
                "Ray knows this node as 10.99.0.2 (enP7s7), not as "
                "hosts.spark-1.fabric.address 192.168.200.12",
                "start Ray on it with that address",
            )
        ],
    ),
    "ray-host-ip-unset": (
        "queue",
        [
            ("spark-1", "vLLM's queue is at 10.99.0.2 (enP7s7)", "delete env.VLLM_HOST_IP: null"),
            ("spark-2", "vLLM's queue is at 10.98.0.2 (enP7s7)", "delete env.VLLM_HOST_IP: null"),
        ],
    ),
}


def test_every_case_but_the_good_ones_is_expected_to_fail() -> None:
    assert set(EXPECTED) == {name for name in CASES if "good" not in name}


@pytest.mark.parametrize("case", EXPECTED)
def test_the_verdict_names_layer_host_address_and_remedy(case: str) -> None:
    layer, said = EXPECTED[case]
    found = verdicts(CASES[case], REPORTS)
    for host, what, remedy in said:
        verdict = found[layer, host]
        assert verdict.state in BAD
        assert what in verdict.found
        assert remedy in verdict.remedy
    expected = {(layer, host) for host, *_ in said}
    assert {key for key, each in found.items() if each.state != "ok"} == expected


@pytest.mark.parametrize(("case", "layers"), [("good", 4), ("ray-good", 5)])
def test_a_good_cluster(case: str, layers: int) -> None:
    found = verdicts(CASES[case], REPORTS)
    assert len(found) == layers * len(HOSTS)
    for each in found.values():
        assert (each.state, each.interfaces, each.remedy) == ("ok", (FABRIC,), "")
    for host in HOSTS:
        assert found["nccl", host].found.startswith("NET/Socket ")
        assert " GB/s " in found["nccl", host].found
        assert found["nccl", host].found.endswith(" us")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_takes_no_more_than_half_a_minute(case: Case) -> None:
    for report in _reports(case):
        assert json.loads(report)["seconds"] < NO_MORE_SECONDS


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_using_ib_is_printed_without_any_device(case: Case) -> None:
    """The line that reads like RDMA proves nothing; no verdict takes it for that."""
    says_so = any("NET/IB : Using [RO]" in report for report in _reports(case))
    found: list[Verdict] = list(verdicts(case, REPORTS).values())
    assert not any("NET/IB" in each.cell or "over RDMA" in each.found for each in found)
    if case.name in {"good", "ray-good", "hca-absent"}:
        assert says_so


def _reports(case: Case) -> Iterator[str]:
    for host in HOSTS:
        yield (REPORTS / f"{case.name}-{host}.json").read_text(encoding="utf-8")
