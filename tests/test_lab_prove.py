"""Prove on the lab's hosts: real Ray, torch, gloo and vLLM, with one address wrong at a time."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab
from tests.test_lab import BASE, ROOT, Result, command, containers, environment, pyinfra, variant

pytestmark = pytest.mark.lab

OFFICE = "10.1.230.180"
RAY_UP = tuple(f"tasks/{name}.py" for name in ("image", "environment", "ray_head", "ray_workers"))


def prove(folder: Path, *before: str, **changes: Any) -> Result:
    """Bring a variant of the lab's cluster up to Ray, then prove it."""
    cluster = variant(folder, **changes) if changes else BASE
    up = pyinfra(*(before or RAY_UP), cluster=cluster)
    assert up.code == 0, up.output
    result = pyinfra("tasks/prove.py", cluster=cluster, timeout=60)
    assert "Traceback" not in result.output
    assert result.seconds < 30
    return result


def row(result: Result, layer: str) -> str:
    return next(line for line in result.output.splitlines() if line.startswith(f"{layer} "))


def shows(result: Result, *parts: str) -> None:
    assert result.code == 1
    for part in parts:
        assert part in result.output


def test_a_good_cluster_is_proven(lab: Lab, tmp_path: Path) -> None:
    result = prove(tmp_path)
    assert result.code == 0
    assert result.seconds < 20
    for layer in ("ray", "c10d", "gloo", "queue"):
        assert row(result, layer).split()[1:] == [
            *("ok", "192.168.200.12", "fabric0"),
            *("ok", "192.168.200.13", "fabric0"),
        ]
    assert row(result, "nccl").split()[1:] == ["skipped", "skipped"]
    assert "do: " not in result.output
    processes = lab.exec("spark-1", "docker", "exec", "vllm-ray", "ps", "ax", "-o", "args")
    assert "prove" not in processes


def test_vllms_queue_on_the_office_network(lab: Lab, tmp_path: Path) -> None:
    """The silent hang of vLLM's start, half an hour later, after all weights are loaded."""
    result = prove(tmp_path, hosts__spark_1__env={"VLLM_HOST_IP": OFFICE})
    shows(
        result,
        f"queue on spark-1 hangs: vLLM's queue is at {OFFICE} (office0), not on the fabric: "
        f"VLLM_HOST_IP is {OFFICE}, from hosts.spark-1.env",
        "do: delete hosts.spark-1.env.VLLM_HOST_IP in cluster.yaml",
        "queue on spark-2 hangs: spark-1 does not answer at 10.1.230.180:",
        "(spark-1's office0): network is unreachable",
        "do: see spark-1",
    )
    assert row(result, "gloo").count("ok") == 2


def test_gloo_on_the_address_of_the_hostname(lab: Lab, tmp_path: Path) -> None:
    """Any Debian: 127.0.1.1 is the hostname's."""
    result = prove(tmp_path, hosts__spark_2__env={"GLOO_SOCKET_IFNAME": None})
    shows(
        result,
        "GLOO_SOCKET_IFNAME is not set: hosts.spark-2.env removes it, and the hostname spark-2 "
        "resolves to 127.0.1.1 (lo)",
        "do: delete hosts.spark-2.env.GLOO_SOCKET_IFNAME: null",
        "gloo on spark-1 ",
        "do: see spark-2",
    )
    assert row(result, "queue").count("ok") == 2


@pytest.mark.slow
def test_gloo_on_loopback(lab: Lab, tmp_path: Path) -> None:
    result = prove(tmp_path, hosts__spark_2__env={"GLOO_SOCKET_IFNAME": "lo"})
    shows(
        result,
        "gloo listens on 127.0.0.1 (lo), not on the fabric: GLOO_SOCKET_IFNAME is lo, from "
        "hosts.spark-2.env",
        "do: delete hosts.spark-2.env.GLOO_SOCKET_IFNAME in cluster.yaml",
        "gloo on spark-1 ",
        "do: see spark-2",
    )


@pytest.mark.slow
def test_gloo_on_loopback_everywhere(lab: Lab, tmp_path: Path) -> None:
    result = prove(tmp_path, env__GLOO_SOCKET_IFNAME="lo")
    shows(result, "gloo on spark-1 ", "gloo on spark-2 ", "GLOO_SOCKET_IFNAME is lo, from env")
    assert result.output.count("do: delete env.GLOO_SOCKET_IFNAME in cluster.yaml") == 2


@pytest.mark.slow
def test_gloo_on_an_interface_that_is_not_there(lab: Lab, tmp_path: Path) -> None:
    result = prove(tmp_path, hosts__spark_2__env={"GLOO_SOCKET_IFNAME": "fabric9"})
    shows(
        result,
        "gloo on spark-2 failed: GLOO_SOCKET_IFNAME is fabric9, from hosts.spark-2.env: no "
        "interface fabric9 with an address here (it has lo 127.0.0.1, ",
        "do: delete hosts.spark-2.env.GLOO_SOCKET_IFNAME in cluster.yaml",
        "gloo on spark-1 hangs: spark-2 failed, and this one waits for it",
        "do: see spark-2",
    )


@pytest.mark.slow
def test_the_address_of_another_host(lab: Lab, tmp_path: Path) -> None:
    result = prove(tmp_path, hosts__spark_2__env={"VLLM_HOST_IP": "192.168.200.12"})
    shows(
        result,
        "queue on spark-2 failed: 192.168.200.12 is not an address of this host: VLLM_HOST_IP is "
        "192.168.200.12, from hosts.spark-2.env",
        "do: delete hosts.spark-2.env.VLLM_HOST_IP in cluster.yaml",
    )


FIREWALL = """
table inet fault {
  chain input {
    type filter hook input priority 0
    ct state established accept
    tcp dport { 22, 6379 } accept
    iifname fabric0 tcp flags syn drop
  }
}
"""


@contextlib.contextmanager
def firewall(lab: Lab, host: str) -> Iterator[None]:
    """Drop new connections over the fabric, Ray's GCS and ssh aside."""
    lab.exec(host, "nft", FIREWALL)
    try:
        yield
    finally:
        lab.exec(host, "nft", "delete", "table", "inet", "fault")


@pytest.mark.slow
def test_a_firewall_on_the_head(lab: Lab, tmp_path: Path) -> None:
    prove(tmp_path)
    with firewall(lab, "spark-1"):
        result = pyinfra("tasks/prove.py", timeout=60)
    assert result.seconds < 30
    shows(
        result,
        "c10d on spark-2 hangs: 192.168.200.12:",
        "(spark-1's fabric0): nothing comes back",
        "do: see spark-2",
        "do: open all TCP ports of spark-1 (192.168.200.12) to spark-2 (192.168.200.13)",
        "c10d on spark-1 failed: spark-2 did not come within",
    )
    assert row(result, "gloo").split()[1:] == ["not", "tried", "not", "tried"]


@pytest.mark.slow
def test_a_firewall_on_the_worker(lab: Lab, tmp_path: Path) -> None:
    """The rendezvous passes; what the head dials does not, and gloo would hang for minutes."""
    prove(tmp_path)
    with firewall(lab, "spark-2"):
        result = pyinfra("tasks/prove.py", timeout=60)
    assert result.seconds < 30
    shows(
        result,
        "queue on spark-1 hangs: spark-2 does not answer at 192.168.200.13:",
        "queue on spark-2 hangs: spark-1 failed, and this one waits for it",
        "do: see spark-1",
        "(spark-2's fabric0)",
        "do: open all TCP ports of spark-2 (192.168.200.13) to spark-1 (192.168.200.12)",
    )
    assert row(result, "c10d").count("ok") == 2


@pytest.mark.slow
def test_ray_does_not_run_on_the_worker(lab: Lab, tmp_path: Path) -> None:
    prove(tmp_path)
    lab.exec("spark-2", "systemctl", "stop", "vllm-ray")
    result = pyinfra("tasks/prove.py", timeout=60)
    assert result.seconds < 30
    shows(result, "ray on spark-2 failed: vllm-ray does not run here", "do: start Ray: ")


@pytest.mark.slow
def test_ray_under_the_office_address(lab: Lab, tmp_path: Path) -> None:
    prove(tmp_path)
    unit = "/etc/systemd/system/vllm-ray.service"
    lab.exec(
        "spark-1", "sed", "-i", f"s/node-ip-address=192.168.200.12/node-ip-address={OFFICE}/", unit
    )
    lab.exec("spark-1", "systemctl", "daemon-reload")
    try:
        lab.exec("spark-1", "systemctl", "restart", "vllm-ray")
        lab.exec("spark-2", "systemctl", "restart", "vllm-ray")
        time.sleep(15)
        result = pyinfra("tasks/prove.py", timeout=60)
    finally:
        pyinfra("tasks/stop.py")
    shows(
        result,
        f"ray on spark-1 failed: Ray knows this node as {OFFICE} (office0), not as "
        "hosts.spark-1.fabric.address 192.168.200.12",
        "do: start Ray on it with that address",
    )


@pytest.mark.slow
def test_without_ray(lab: Lab, tmp_path: Path) -> None:
    """Executor mp: nothing of ours runs yet, and nothing stays."""
    pyinfra("tasks/stop.py")
    files = ("tasks/image.py", "tasks/environment.py")
    result = prove(tmp_path, *files, executor="mp")
    assert result.code == 0
    assert row(result, "queue").count("ok") == 2
    assert not any(line.startswith("ray ") for line in result.output.splitlines())
    assert containers(lab) == {}


@pytest.mark.slow
def test_as_json(lab: Lab, tmp_path: Path) -> None:
    prove(tmp_path)
    done = subprocess.run(
        [*command("tasks/prove.py"), "--data", "json=true"],
        cwd=ROOT,
        env=environment(BASE),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    verdicts = json.loads(done.stdout)
    assert {each["layer"] for each in verdicts} == {"ray", "c10d", "gloo", "queue", "nccl"}
    assert all(each["state"] in {"ok", "skipped"} for each in verdicts)
