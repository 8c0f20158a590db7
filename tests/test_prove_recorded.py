"""Verdicts over what prove's ranks said on a real GPU: an H200 shared by two network namespaces.

NCCL 2.28.9, torch 2.11; a fabric and a management network, the default route on the latter. That
machine had no zmq, so the queue layer is not judged here. logs/nccl/CASE-HOST.json is the last line
of remote/prove.py's output.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.proof import Report, Verdict, judge
from cluster.settings import Cluster

LOGS = Path(__file__).parent / "logs" / "nccl"
CLUSTER = Cluster.model_validate(
    {
        "image": "i",
        "model": "m",
        "executor": "mp",
        "hosts": {
            "spark-a": {
                "role": "head",
                "fabric": {"address": "192.168.200.12", "interface": "enp1s0f1np1"},
            },
            "spark-b": {"fabric": {"address": "192.168.200.13", "interface": "enp1s0f1np1"}},
        },
    }
)


def verdicts(case: str) -> dict[tuple[str, str], Verdict]:
    reports = {
        name: Report.model_validate(json.loads((LOGS / f"{case}-{name}.json").read_text()))
        for name in CLUSTER.nodes
    }
    return {(each.layer, each.host): each for each in judge(CLUSTER, CLUSTER.nodes, reports, {})}


@pytest.mark.parametrize("case", ["good", "unset", "absent", "half"])
def test_the_layers_below_are_on_the_fabric(case: str) -> None:
    found = verdicts(case)
    for layer in ("c10d", "gloo"):
        for host in CLUSTER.nodes:
            assert found[layer, host].state == "ok"
            assert found[layer, host].interfaces == ("enp1s0f1np1",)


def test_a_good_cluster() -> None:
    found = verdicts("good")
    for host in CLUSTER.nodes:
        verdict = found["nccl", host]
        assert verdict.state == "ok"
        assert verdict.interfaces == ("enp1s0f1np1",)
        assert "Socket" in verdict.found
        assert "1.816 GB/s" in verdict.found


def test_a_variable_that_is_unset_where_the_other_network_goes_nowhere() -> None:
    """NCCL itself hangs there without a word, and torch's timeout does not fire."""
    found = verdicts("unset")
    assert {found["nccl", host].state for host in CLUSTER.nodes} == {"hangs"}
    text = " ".join(f"{each.found} {each.remedy} {each.evidence}" for each in found.values())
    assert "10.99.0.2" in text
    assert "NCCL_SOCKET_IFNAME" in text


def test_an_interface_that_is_absent() -> None:
    found = verdicts("absent")
    assert found["nccl", "spark-a"].state == "failed"
    text = found["nccl", "spark-a"].found + found["nccl", "spark-a"].remedy
    assert "enp9s9" in text
    assert "NCCL_SOCKET_IFNAME" in text


def test_half_of_the_bytes_on_the_slow_network_is_a_failure_although_it_works() -> None:
    found = verdicts("half")
    for host in CLUSTER.nodes:
        verdict = found["nccl", host]
        assert verdict.state == "failed"
        assert "enP7s7" in verdict.found + verdict.remedy
