"""The units under both generations of systemd: spark-1's knows no back-off, spark-2's does."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from cluster.load import load
from cluster.node import render
from tests.lab import Lab
from tests.test_lab import variant
from tests.test_render import CASES, IMAGE

pytestmark = pytest.mark.lab

VERSIONS = {"spark-1": 252, "spark-2": 257}
SINCE_254 = ("RestartSteps", "RestartMaxDelaySec")
FOLDER = "/run/lab-units"
CRASHING = "lab-crashing.service"
QUICK = {"delay": 1, "max_delay": 10, "limit": 6, "within": 300}
GROWING = [1, 1.78, 3.16, 5.62, 10, 10]
CONSTANT = [1.0] * 6


def units(path: Path) -> dict[str, dict[str, str]]:
    """Every node's unit files by name: {"spark-1": {"vllm-ray.service": text}}."""
    cluster = load(path)
    return {
        node: {
            Path(file.path).name: file.content
            for file in render(cluster, node, IMAGE).files
            if file.path.endswith((".service", ".timer"))
        }
        for node in cluster.nodes
    }


def test_the_lab_has_both_generations(lab: Lab) -> None:
    for host, version in VERSIONS.items():
        assert lab.exec(host, "systemctl", "--version").startswith(f"systemd {version} ")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("host", VERSIONS)
def test_systemd_takes_the_units(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, host: str, case: str
) -> None:
    """All that the older one says is that it does not know the two keys of the back-off."""
    monkeypatch.setenv("TEST_RAY_TOKEN", "ray-token")
    monkeypatch.setenv("TEST_API_KEY", "api-key")
    for node, files in units(CASES[case]).items():
        folder = f"{FOLDER}/{case}/{node}"
        lab.write(host, {f"{folder}/{name}": text for name, text in files.items()})
        said = lab.exec(host, "sh", "-c", f"systemd-analyze verify {folder}/* 2>&1")
        expected = []
        for name, text in sorted(files.items()):
            for number, line in enumerate(text.splitlines(), 1):
                key = line.partition("=")[0]
                if VERSIONS[host] < 254 and key in SINCE_254:
                    where = f"{folder}/{name}:{number}"
                    expected.append(f"{where}: Unknown key '{key}' in section [Service], ignoring.")
        # A deployed unit that one of these names is read, too.
        about = [line for line in said.splitlines() if not line.startswith("/etc/systemd/system/")]
        assert sorted(about) == expected


def crashing(unit: str) -> str:
    """One of our units with a command that fails at once in the place of its own ones."""
    rest = re.sub(r"^Exec\w+=(?:.*\\\n)*.*\n", "", unit, flags=re.MULTILINE)
    assert "docker run" not in rest
    return rest.replace("[Service]\n", "[Service]\nExecStart=/bin/false\n")


def crash_loop(lab: Lab, host: str) -> list[tuple[float, str]]:
    """Start the crashing unit, wait until systemd gives it up; what the journal says, and when."""
    began = time.time()
    lab.exec(host, "systemctl", "daemon-reload")
    lab.exec(host, "systemctl", "start", "--no-block", CRASHING)
    deadline = time.monotonic() + sum(GROWING) + 25
    state = ""
    while state != "failed":
        assert time.monotonic() < deadline, f"{CRASHING} is still {state}"
        time.sleep(0.5)
        state = lab.exec(host, "systemctl", "show", "-P", "ActiveState", CRASHING).strip()
    argv = ["journalctl", "--unit", CRASHING, "-o", "json", f"--since=@{began:.3f}"]
    entries = [json.loads(row) for row in lab.exec(host, *argv).splitlines()]
    return [(int(each["__MONOTONIC_TIMESTAMP"]) / 1e6, each["MESSAGE"]) for each in entries]


@pytest.mark.parametrize(("host", "delays"), [("spark-1", CONSTANT), ("spark-2", GROWING)])
def test_a_crash_loop_ends_in_failed(
    lab: Lab, tmp_path: Path, host: str, delays: list[float]
) -> None:
    """With growing delays where systemd knows how, and after as many starts everywhere."""
    ours = units(variant(tmp_path, restarts=QUICK))[host]["vllm-ray.service"]
    path = f"/run/systemd/system/{CRASHING}"
    lab.write(host, {path: crashing(ours)})
    try:
        said = crash_loop(lab, host)
    finally:
        lab.exec(host, "rm", path)
        lab.exec(host, "systemctl", "reset-failed", CRASHING, check=False)
        lab.exec(host, "systemctl", "daemon-reload")
    ended = [at for at, text in said if "Main process exited" in text]
    again = [at for at, text in said if "Scheduled restart job" in text]
    assert len(ended) == QUICK["limit"]
    assert any("Start request repeated too quickly" in text for _, text in said)
    waited = [after - before for before, after in zip(ended, again, strict=True)]
    assert waited == pytest.approx(delays, abs=0.5)
