"""tasks/discover.py on real hosts: it has to find what tests/lab/cluster.yaml says."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from cluster.load import load
from cluster.settings import Cluster
from tests.lab import Lab

pytestmark = pytest.mark.lab

ROOT = Path(__file__).parent.parent
BASE = ROOT / "tests" / "lab" / "cluster.yaml"
SSH_CONFIG = "ssh_config_file=.lab/ssh/config"


@dataclass
class Outcome:
    """A finished run: stdout is for files, stderr for people."""

    code: int
    stdout: str
    stderr: str


def discover(*arguments: str, inventory: str = "inventory.py", cluster: Path = BASE) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-m", "pyinfra", "-y", inventory, "tasks/discover.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "CLUSTER": str(cluster), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    print(done.stdout, done.stderr)
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_hosts_that_ssh_reaches(lab: Lab, tmp_path: Path) -> None:
    """Without a cluster.yaml and without root, over an ssh config with a jump."""
    result = discover(
        *("--data", SSH_CONFIG), inventory="spark-1,spark-2", cluster=tmp_path / "none.yaml"
    )
    assert result.code == 0, result.stderr
    section = yaml.safe_load(result.stdout)
    cluster = Cluster.model_validate({"image": "i", "model": "m", **section})
    assert cluster.head == "spark-1"
    fabrics = {name: host.fabric for name, host in cluster.hosts.items()}
    assert {name: (str(fabric.address), fabric.interface) for name, fabric in fabrics.items()} == {
        "spark-1": ("192.168.200.12/24", "fabric0"),
        "spark-2": ("192.168.200.13/24", "fabric0"),
    }
    assert section["hosts"]["spark-2"]["ssh"]["via"] == "spark-1"
    said = " ".join(result.stdout.replace("#", "").split())
    assert "fabric0: no RDMA, a virtual interface, MTU 1500; tried with spark-2 in both" in said
    assert "Not office0 10.1.230.180/24: no other host has an address in 10.1.230.0/24." in said
    assert "Not docker0 172.17.0.1/16: a bridge." in said


def test_the_hosts_of_the_cluster_file_are_as_it_says(lab: Lab) -> None:
    for inventory, more in (("inventory.py", ()), ("spark-1,spark-2", ("--data", SSH_CONFIG))):
        result = discover(*more, inventory=inventory)
        assert result.code == 0, result.stderr
        assert result.stdout == ""
        assert f"{BASE} says the same already" in result.stderr


def test_a_wrong_file_is_corrected_on_request(lab: Lab, tmp_path: Path) -> None:
    """The office address of the head, another network's interface on the worker."""
    text = BASE.read_text(encoding="utf-8")
    path = tmp_path / "cluster.yaml"
    wrong = text.replace(
        "192.168.200.12/24, interface: fabric0", "10.1.230.180, interface: office0"
    )
    wrong = wrong.replace("192.168.200.13/24, interface: fabric0", "10.1.230.181, interface: eth0")
    assert wrong.count("10.1.230.18") == 2
    path.write_text(wrong, encoding="utf-8")
    result = discover(cluster=path)
    assert result.code == 0, result.stderr
    assert "-    fabric: {address: 10.1.230.180, interface: office0}" in result.stdout
    assert path.read_text(encoding="utf-8") == wrong
    result = discover("--data", f"write={path}", "--data", "overwrite=yes", cluster=path)
    assert result.code == 0, result.stderr
    assert load(path).hosts == load(BASE).hosts
    kept = [line for line in text.splitlines() if "fabric:" not in line]
    assert [line for line in kept if line not in path.read_text(encoding="utf-8")] == []
