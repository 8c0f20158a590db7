"""Faults of a serving lab, and how long each takes to heal, split by who takes the time."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.lab import Lab
from tests.test_lab import completions, containers

ENDED = re.compile(r"Deactivated successfully|process exited|Failed with|Stopping|repeated too")


@dataclass(frozen=True)
class Fault:
    """Something that breaks, and what may be asked of its healing."""

    inject: Callable[[Lab], object]
    is_kill: bool = True
    """A process has gone: that can be noticed at once."""
    deadline: float = 300


@dataclass(frozen=True)
class Recovery:
    """Seconds of a recovery."""

    detection: float
    """From the fault until the first of our units has ended."""
    restart: float
    """From there until vllm serve is started, without Ray's part."""
    ray: float
    """Ray starts, or a raylet takes its time to see that its head is another one."""
    vllm: float
    """From the start of vllm serve to a completion."""

    def __str__(self) -> str:
        total = self.detection + self.restart + self.ray + self.vllm
        return (
            f"recovered after {total:.0f} s: detection {self.detection:.1f}, "
            f"restart {self.restart:.1f}, Ray {self.ray:.1f}, vLLM {self.vllm:.1f}"
        )


@dataclass(frozen=True)
class Line:
    """A line of a host's journal about one of our units."""

    host: str
    unit: str
    text: str
    at: float
    """Unix time."""
    is_systemd: bool


def recover(lab: Lab, fault: Fault) -> Recovery:
    """Inject a fault, wait for a completion, check that nothing is left over."""
    expected = completions()
    before = containers(lab)
    began = time.time()
    fault.inject(lab)
    while time.time() - began < fault.deadline:
        time.sleep(0.5)
        # Until something has restarted, an answer is the old engine's last.
        with contextlib.suppress(Exception):
            if containers(lab) != before and completions() == expected:
                break
    else:
        raise AssertionError(f"no completion within {fault.deadline} s")
    recovery = split(list(journal(lab, began)), began, time.time())
    print(recovery)
    settled(lab, set(before))
    return recovery


def settled(lab: Lab, names: set[str]) -> None:
    """Every container once, one raylet per host."""
    assert set(containers(lab)) == names
    for host in lab.hosts:
        assert lab.exec(host, "pgrep", "-c", "raylet").strip() == "1"


def journal(lab: Lab, since: float) -> Iterator[Line]:
    for host in lab.hosts:
        units = ("-u", "vllm-ray", "-u", "vllm-serve")
        out = lab.exec(host, "journalctl", "-o", "json", f"--since=@{since:.3f}", *units)
        for row in out.splitlines():
            entry: dict[str, Any] = json.loads(row)
            if isinstance(entry.get("MESSAGE"), str):
                yield Line(
                    host,
                    entry.get("UNIT") or entry.get("_SYSTEMD_UNIT", ""),
                    entry["MESSAGE"],
                    int(entry["__REALTIME_TIMESTAMP"]) / 1e6,
                    entry.get("SYSLOG_IDENTIFIER") == "systemd",
                )


def split(lines: list[Line], began: float, ended: float) -> Recovery:
    lines = sorted(lines, key=lambda line: line.at)
    detected = next(
        (line.at for line in lines if line.is_systemd and ENDED.search(line.text)), began
    )
    serving = max(
        line.at for line in lines if line.text.startswith("Started vllm-serve") and line.at < ended
    )
    busy = [
        (max(start, detected), min(end, serving))
        for start, end in ray_times(lines)
        if start < serving and end > detected
    ]
    ray = union(busy)
    return Recovery(detected - began, serving - detected - ray, ray, ended - serving)


def ray_times(lines: list[Line]) -> Iterator[tuple[float, float]]:
    """When Ray started on a host, and when a raylet had not yet noticed that its head was new."""
    ready: dict[str, float] = {}
    started: dict[str, float] = {}
    for line in lines:
        if not line.unit.startswith("vllm-ray"):
            continue
        if line.text.startswith("Started vllm-ray"):
            started[line.host] = line.at
        elif "Ray runtime started" in line.text and line.host in started:
            yield started.pop(line.host), line.at
            ready[line.host] = line.at
        elif line.is_systemd and ENDED.search(line.text):
            for host, since in ready.items():
                if host != line.host:
                    yield since, line.at


def union(intervals: list[tuple[float, float]]) -> float:
    """The length of all intervals together, seconds."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def signal(lab: Lab, host: str, name: str, pattern: str) -> None:
    """Signal the processes of a host whose command line has `pattern` in it, by their pids."""
    pids = lab.exec(host, "pgrep", "-f", pattern).split()
    lab.exec(host, "sh", "-c", f"kill -{name} {' '.join(pids)}", check=False)


def power_cut(lab: Lab) -> None:
    """Both hosts; the worker is back a minute early."""
    for host in lab.hosts:
        lab.kill(host)
    lab.start("spark-2")
    time.sleep(60)
    lab.start("spark-1")


def long_cut(lab: Lab) -> None:
    """The fabric, longer than Ray and vLLM bear it."""
    lab.link("spark-2", "fabric", up=False)
    time.sleep(100)
    lab.link("spark-2", "fabric", up=True)


FAULTS = {
    "the worker's Ray is killed": Fault(
        lambda lab: lab.exec("spark-2", "docker", "kill", "vllm-ray")
    ),
    "the head's Ray is killed": Fault(
        lambda lab: lab.exec("spark-1", "docker", "kill", "vllm-ray")
    ),
    "vllm serve is killed": Fault(lambda lab: lab.exec("spark-1", "docker", "kill", "vllm-serve")),
    "vllm serve is removed": Fault(
        lambda lab: lab.exec("spark-1", "docker", "rm", "-f", "vllm-serve")
    ),
    "the worker's Ray is removed": Fault(
        lambda lab: lab.exec("spark-2", "docker", "rm", "-f", "vllm-ray")
    ),
    "a rank is killed": Fault(lambda lab: signal(lab, "spark-2", "KILL", "RayWorkerProc")),
    "a raylet is killed": Fault(lambda lab: signal(lab, "spark-2", "KILL", "raylet")),
    "the GCS is killed": Fault(lambda lab: signal(lab, "spark-1", "KILL", "gcs_server")),
    "the engine is wedged": Fault(
        lambda lab: signal(lab, "spark-1", "STOP", "VLLM::EngineCore"), is_kill=False
    ),
    "Docker is restarted": Fault(lambda lab: lab.exec("spark-2", "systemctl", "restart", "docker")),
    "the worker reboots": Fault(lambda lab: lab.restart("spark-2"), is_kill=False),
    "the head reboots": Fault(lambda lab: lab.restart("spark-1"), is_kill=False),
    "both lose power": Fault(power_cut, is_kill=False, deadline=400),
    "the fabric is cut for long": Fault(long_cut, is_kill=False, deadline=400),
}
FAST = ("the worker's Ray is killed", "the head's Ray is killed", "the engine is wedged")
"""The most telling ones; the others take `make test-all`."""
