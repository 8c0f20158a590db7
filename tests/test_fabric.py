"""Does a host have the fabric address that cluster.yaml gives it?"""

from pathlib import Path

import pytest

from cluster.fabric import Addresses, fabric_problem
from cluster.load import load

CLUSTER = load(Path(__file__).parent / "clusters" / "two-hosts.yaml")
OFFICE = {"lo": ["127.0.0.1"], "enP7s7": ["10.1.230.180"]}


@pytest.mark.parametrize(
    ("addresses", "says"),
    [
        ({**OFFICE, "enp1s0f1np1": ["192.168.200.12"]}, None),
        ({**OFFICE, "enp1s0f1np1": ["10.9.9.9", "192.168.200.12"]}, None),
        ({**OFFICE, "enp1s0f0np0": ["192.168.200.12"]}, "interface: enp1s0f0np0"),
        ({**OFFICE, "enp1s0f1np1": ["192.168.200.99"]}, "has 192.168.200.99, not the fabric"),
        (OFFICE, "enP7s7 10.1.230.180"),
        ({}, "this host has none"),
    ],
)
def test_the_problem_names_host_interface_and_remedy(
    addresses: Addresses, says: str | None
) -> None:
    problem = fabric_problem(CLUSTER, "spark-1", addresses)
    if says is None:
        assert problem is None
    else:
        assert problem is not None
        assert says in "; ".join(problem)
