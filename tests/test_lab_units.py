"""The units under two generations of systemd, spark-1's and spark-2's."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path

import pytest

from cluster.load import load
from cluster.node import render
from cluster.programs import source
from tests.lab import Lab
from tests.test_lab import variant
from tests.test_render import CASES, IMAGE

pytestmark = pytest.mark.lab

VERSIONS = {"spark-1": 252, "spark-2": 257}
FOLDER = "/run/lab-units"
CRASHING = "lab-crashing"
QUICK = {"delay": 1, "max_delay": 10, "limit": 6, "within": 300}
DELAYS = [1, 2, 4, 8, 10]
"""Between the ends of six starts."""


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
    monkeypatch.setenv("TEST_RAY_TOKEN", "ray-token")
    monkeypatch.setenv("TEST_API_KEY", "api-key")
    for node, files in units(CASES[case]).items():
        folder = f"{FOLDER}/{case}/{node}"
        lab.write(host, {f"{folder}/{name}": text for name, text in files.items()})
        said = lab.exec(host, "sh", "-c", f"systemd-analyze verify {folder}/* 2>&1")
        # A deployed unit that one of these names is read, too.
        about = [line for line in said.splitlines() if not line.startswith("/etc/systemd/system/")]
        assert about == []


def crashing(unit: str) -> str:
    """One of our units, under another name, with a command that fails at once instead of docker."""
    rest = re.sub(r"^Exec\w+=(?!.*back_off)(?:.*\\\n)*.*\n", "", unit, flags=re.MULTILINE)
    assert "docker" not in rest.replace("docker.service", "")
    rest = rest.replace("vllm-ray", CRASHING).replace("/etc/vllm/", f"{FOLDER}/")
    return rest.replace("[Service]\n", "[Service]\nExecStart=/bin/false\n")


def crash_loop(lab: Lab, host: str) -> list[tuple[float, str]]:
    """Start the crashing unit, wait until systemd gives it up; what the journal says, and when."""
    began = time.time()
    lab.exec(host, "systemctl", "daemon-reload")
    lab.exec(host, "systemctl", "start", "--no-block", CRASHING)
    deadline = time.monotonic() + sum(DELAYS) + 25
    state = ""
    while state != "failed":
        assert time.monotonic() < deadline, f"{CRASHING} is still {state}"
        time.sleep(0.5)
        state = lab.exec(host, "systemctl", "show", "-P", "ActiveState", CRASHING).strip()
    argv = ["journalctl", "--unit", CRASHING, "-o", "json", f"--since=@{began:.3f}"]
    entries = [json.loads(row) for row in lab.exec(host, *argv).splitlines()]
    return [(int(each["__MONOTONIC_TIMESTAMP"]) / 1e6, each["MESSAGE"]) for each in entries]


@pytest.mark.parametrize("host", VERSIONS)
def test_a_crash_loop_grows_slower_and_ends_in_failed(lab: Lab, tmp_path: Path, host: str) -> None:
    ours = units(variant(tmp_path, restarts=QUICK))[host]["vllm-ray.service"]
    path = f"/run/systemd/system/{CRASHING}.service"
    lab.write(host, {path: crashing(ours), f"{FOLDER}/back_off.py": source("back_off")})
    try:
        said = crash_loop(lab, host)
        # A person who starts it does not wait: systemctl returns once its command runs.
        began = time.monotonic()
        lab.exec(host, "sh", "-c", 'systemctl reset-failed "$0"; systemctl start "$0"', CRASHING)
        assert time.monotonic() - began < 3
        lab.exec(host, "systemctl", "stop", CRASHING)
    finally:
        lab.exec(host, "rm", path)
        lab.exec(host, "systemctl", "reset-failed", CRASHING, check=False)
        lab.exec(host, "systemctl", "daemon-reload")
    ended = [at for at, text in said if "Main process exited" in text]
    assert any("Start request repeated too quickly" in text for _, text in said)
    waited = [after - before for before, after in itertools.pairwise(ended)]
    assert waited == pytest.approx(DELAYS, abs=0.7)
