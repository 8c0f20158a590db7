"""Faults in a serving cluster: each is injected, and then a client waits for a completion again.

Nobody helps: the units and the watchdog do it. Every test prints how long it took, and what of.
"""

from __future__ import annotations

import contextlib
import re
import time

import pytest

from tests.faults import FAST, FAULTS, recover
from tests.lab import Lab
from tests.test_lab import completions, containers, deploy, variant

pytestmark = pytest.mark.lab

# Other faults look like a wedge for a moment, too; they must not use up the restarts.
QUICK = {
    **{"every": 5, "deadline": 5, "failures": 2, "minimum_uptime": 5, "cool_down": 5},
    "restarts_per_hour": 100,
}
PATIENT = {"limit": 200, "reset_after": 5}
"""So many faults in one hour, and so soon, are a crash loop anywhere else."""
DETECTION_SECONDS = 15
OUR_SECONDS = 15


@pytest.fixture(scope="module", autouse=True)
def serving(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    deploy(variant(tmp_path_factory.mktemp("faults"), watchdog=QUICK, restarts=PATIENT))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAULTS]
)
def test_it_heals(lab: Lab, name: str) -> None:
    fault, began = FAULTS[name], time.time()
    recovery = recover(lab, fault)
    if fault.is_kill:
        assert recovery.detection <= DETECTION_SECONDS
        assert recovery.restart <= OUR_SECONDS
    if name == "the engine is wedged":
        since = f"--since=@{began:.0f}"
        said = lab.exec("spark-1", "journalctl", "-u", "vllm-watchdog", "-o", "cat", since)
        assert "failure 2 in a row, 2 restart" in said
        assert re.search(r"restarting vllm-(serve|ray).service", said)


@pytest.mark.slow
def test_a_short_cut_restarts_nothing(lab: Lab) -> None:
    before = containers(lab)
    lab.link("spark-2", "fabric", up=False)
    time.sleep(8)
    lab.link("spark-2", "fabric", up=True)
    assert completions()
    assert containers(lab) == before


@pytest.mark.slow
@pytest.mark.parametrize("host", ["spark-1", "spark-2"])
def test_without_ray_the_ranks_restart_together(
    lab: Lab, tmp_path_factory: pytest.TempPathFactory, host: str
) -> None:
    folder = tmp_path_factory.mktemp("mp")
    seldom = {**QUICK, "every": 600}  # nobody asks: the ranks have to find out by themselves
    deploy(variant(folder, executor="mp", watchdog=seldom, restarts=PATIENT))
    expected, before = completions(), set(containers(lab).values())
    began = time.monotonic()
    lab.exec(host, "docker", "kill", "vllm-serve")
    while before & set(containers(lab).values()):
        assert time.monotonic() - began < DETECTION_SECONDS
        time.sleep(0.5)
    print(f"the other rank has ended after {time.monotonic() - began:.1f} s")
    while time.monotonic() - began < 200:
        with contextlib.suppress(OSError):
            if completions() == expected:
                break
        time.sleep(1)
    now = containers(lab)
    assert len(now) == 2, f"no completion of a new group: {now}"
    assert not before & set(now.values())
    assert completions() == expected
