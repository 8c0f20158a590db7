"""Faults in a serving cluster: each is injected, and then a client waits for a completion again.

Nobody helps: the units and the watchdog do it. Every test prints how long it took.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable

import pytest

from tests.lab import Lab
from tests.test_lab import completions, containers, deploy, variant

pytestmark = pytest.mark.lab

# Other faults look like a wedge for a moment, too; they must not use up the restarts.
QUICK = {
    **{"every": 5, "deadline": 5, "failures": 2, "minimum_uptime": 5, "cool_down": 5},
    "restarts_per_hour": 100,
}


@pytest.fixture(scope="module", autouse=True)
def serving(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    deploy(variant(tmp_path_factory.mktemp("faults"), watchdog=QUICK))


def recovery(lab: Lab, inject: Callable[[], object], timeout: float = 300) -> float:
    """Seconds from the fault to the first completion after the service was seen gone."""
    expected = completions()
    before = containers(lab)
    began = time.monotonic()
    inject()
    while time.monotonic() - began < timeout:
        time.sleep(1)
        # Until something has restarted, an answer is the old engine's last.
        with contextlib.suppress(Exception):
            if containers(lab) != before and completions() == expected:
                break
    else:
        raise AssertionError(f"no completion within {timeout} s")
    seconds = time.monotonic() - began
    print(f"recovered after {seconds:.0f} s")
    after = containers(lab)
    assert set(after) == set(before)
    for host in lab.hosts:
        raylets = lab.exec(host, "pgrep", "-c", "raylet")
        assert raylets.strip() == "1"
    return seconds


def signal(lab: Lab, host: str, name: str, pattern: str) -> None:
    """Signal the processes of a host whose command line has `pattern` in it, by their pids."""
    pids = lab.exec(host, "pgrep", "-f", pattern).split()
    lab.exec(host, "sh", "-c", f"kill -{name} {' '.join(pids)}", check=False)


def test_the_workers_ray_is_killed(lab: Lab) -> None:
    recovery(lab, lambda: lab.exec("spark-2", "docker", "kill", "vllm-ray"))


def test_the_heads_ray_is_killed(lab: Lab) -> None:
    recovery(lab, lambda: lab.exec("spark-1", "docker", "kill", "vllm-ray"))


def test_a_wedged_engine_is_found_by_the_watchdog(lab: Lab) -> None:
    """The engine stands still, the API still answers /health."""
    recovery(lab, lambda: signal(lab, "spark-1", "STOP", "VLLM::EngineCore"))
    journal = lab.exec("spark-1", "journalctl", "-u", "vllm-watchdog", "-o", "cat", "--no-pager")
    assert "failure 2 in a row, 2 restart" in journal
    assert re.search(r"restarting vllm-(serve|ray).service", journal)


@pytest.mark.slow
def test_serve_is_killed(lab: Lab) -> None:
    recovery(lab, lambda: lab.exec("spark-1", "docker", "kill", "vllm-serve"))


@pytest.mark.slow
def test_a_rank_is_killed(lab: Lab) -> None:
    recovery(lab, lambda: signal(lab, "spark-2", "KILL", "RayWorkerProc"))


@pytest.mark.slow
def test_a_raylet_is_killed(lab: Lab) -> None:
    recovery(lab, lambda: signal(lab, "spark-2", "KILL", "raylet"))


@pytest.mark.slow
def test_the_gcs_is_killed(lab: Lab) -> None:
    recovery(lab, lambda: signal(lab, "spark-1", "KILL", "gcs_server"))


@pytest.mark.slow
def test_docker_is_restarted(lab: Lab) -> None:
    recovery(lab, lambda: lab.exec("spark-2", "systemctl", "restart", "docker"))


@pytest.mark.slow
def test_the_worker_reboots(lab: Lab) -> None:
    recovery(lab, lambda: lab.restart("spark-2"))


@pytest.mark.slow
def test_the_head_reboots(lab: Lab) -> None:
    recovery(lab, lambda: lab.restart("spark-1"))


@pytest.mark.slow
def test_both_lose_power_and_the_worker_is_back_a_minute_early(lab: Lab) -> None:
    def outage() -> None:
        for host in lab.hosts:
            lab.kill(host)
        lab.start("spark-2")
        time.sleep(60)
        lab.start("spark-1")

    recovery(lab, outage, timeout=400)


@pytest.mark.slow
def test_a_short_cut_restarts_nothing(lab: Lab) -> None:
    before = containers(lab)
    lab.link("spark-2", "fabric", up=False)
    time.sleep(8)
    lab.link("spark-2", "fabric", up=True)
    assert completions()
    assert containers(lab) == before


@pytest.mark.slow
def test_a_long_cut_restarts_the_group(lab: Lab) -> None:
    def cut() -> None:
        lab.link("spark-2", "fabric", up=False)
        time.sleep(100)
        lab.link("spark-2", "fabric", up=True)

    recovery(lab, cut, timeout=400)
