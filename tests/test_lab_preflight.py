"""Preflight on the lab's hosts: every fault for real, named with host, layer and remedy."""

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
from tests.test_lab import BASE, ROOT, Result, command, environment, pyinfra, variant

pytestmark = pytest.mark.lab

FIREWALL = """
table inet fault {{
  chain input {{
    type filter hook input priority 0
    ct state established accept
    tcp dport 22 accept
    {}
    iifname fabric0 drop
  }}
}}
"""


@pytest.fixture(scope="module", autouse=True)
def stopped(lab: Lab) -> None:
    """Faults are looked for where nothing runs yet."""
    assert pyinfra("tasks/stop.py").code == 0


def preflight(**changes: Any) -> Result:
    folder = changes.pop("folder", None)
    cluster = variant(folder, **changes) if folder else BASE
    result = pyinfra("tasks/preflight.py", cluster=cluster, timeout=60)
    assert "Traceback" not in result.output
    assert result.seconds < 30
    return result


def shows(result: Result, *parts: str) -> None:
    assert result.code == 1
    for part in parts:
        assert part in result.output


@contextlib.contextmanager
def firewall(lab: Lab, host: str, rules: str) -> Iterator[None]:
    """Drop what comes in over the fabric, ssh and `rules` aside."""
    lab.exec(host, "nft", FIREWALL.format(rules))
    try:
        yield
    finally:
        lab.exec(host, "nft", "delete table inet fault")


@contextlib.contextmanager
def listener(lab: Lab, host: str, port: int) -> Iterator[None]:
    """A foreign process on a port."""
    unit = f"fault-{port}"
    lab.exec(host, "systemd-run", "-q", f"--unit={unit}", "python3", "-m", "http.server", str(port))
    time.sleep(1)
    try:
        yield
    finally:
        lab.exec(host, "systemctl", "stop", unit)


def test_a_good_cluster_has_no_finding_and_is_quick(lab: Lab) -> None:
    result = preflight()
    assert result.code == 0
    assert "error" not in result.output
    assert "warning" not in result.output
    assert result.seconds < 8


def test_findings_for_machines(lab: Lab, tmp_path: Path) -> None:
    cluster = variant(tmp_path, hosts__spark_2__fabric__interface="fabric9")
    done = subprocess.run(
        [*command("tasks/preflight.py"), "--data", "json=true"],
        cwd=ROOT,
        env=environment(cluster),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    (finding,) = json.loads(done.stdout)
    assert (finding["id"], finding["host"], finding["severity"]) == (
        *("fabric-address", "spark-2"),
        "error",
    )
    assert set(finding) == {"id", "severity", "host", "found", "why", "remedy", "source"}


def test_silenced_with_a_reason(lab: Lab, tmp_path: Path) -> None:
    with listener(lab, "spark-1", 28000):
        result = preflight(folder=tmp_path, silence={"port-taken": "we know it"})
    assert result.code == 0
    assert "port-taken is silenced (we know it)" in result.output


def test_swapped_addresses(lab: Lab, tmp_path: Path) -> None:
    result = preflight(
        folder=tmp_path,
        hosts__spark_1__fabric__address="192.168.200.13/24",
        hosts__spark_2__fabric__address="192.168.200.12/24",
    )
    shows(
        result,
        "interface fabric0 has 192.168.200.12, not the fabric address 192.168.200.13",
        "correct hosts.spark-1.fabric.address",
        "correct hosts.spark-2.fabric.address",
    )


def test_interface_of_the_other_network(lab: Lab, tmp_path: Path) -> None:
    result = preflight(folder=tmp_path, hosts__spark_1__fabric__interface="office0")
    shows(result, "on interface fabric0, not on office0", "hosts.spark-1.fabric.interface: fabric0")


def test_interface_missing_on_the_worker(lab: Lab, tmp_path: Path) -> None:
    result = preflight(folder=tmp_path, hosts__spark_2__fabric__interface="enp1s0f1np1")
    shows(result, "not on enp1s0f1np1", "hosts.spark-2.fabric.interface: fabric0")


def test_a_firewall_that_lets_only_ray_through(lab: Lab) -> None:
    with firewall(lab, "spark-2", "tcp dport 6379 accept"):
        result = preflight()
    shows(result, "fabric-firewall", "some ports do not open", "on spark-2, allow everything")


def test_a_firewall_in_one_direction(lab: Lab) -> None:
    with firewall(lab, "spark-2", ""):
        result = preflight()
    shows(
        result,
        "fabric-firewall: no port opens from 192.168.200.12 to 192.168.200.13 (spark-2)",
        "but the other direction works",
    )


def test_mtu_of_one_end(lab: Lab) -> None:
    lab.exec("spark-1", "ip", "link", "set", "fabric0", "mtu", "9000")
    try:
        result = preflight()
    finally:
        lab.exec("spark-1", "ip", "link", "set", "fabric0", "mtu", "1500")
    shows(result, "fabric-mtu: MTU 1500 on fabric0, but 9000 on spark-1", "mtu 9000 on spark-2")


@pytest.mark.parametrize(("port", "key"), [(6379, "ray.port"), (28000, "serve.port")])
def test_a_foreign_process_on_a_port(lab: Lab, port: int, key: str) -> None:
    with listener(lab, "spark-1", port):
        result = preflight()
    shows(result, "port-taken: python3 (pid ", f"listens on port {port}", f"another {key}")


def test_a_foreign_container_under_our_name(lab: Lab) -> None:
    image = "registry.lab:5000/vllm-cpu:lab"
    lab.exec("spark-2", "docker", "create", "--name", "vllm-ray", image)
    try:
        result = preflight()
    finally:
        lab.exec("spark-2", "docker", "rm", "vllm-ray")
    shows(result, "container-name", "docker rename vllm-ray")


def test_docker_stopped_on_the_worker(lab: Lab) -> None:
    lab.exec("spark-2", "systemctl", "stop", "docker.socket", "docker")
    try:
        result = preflight()
    finally:
        lab.exec("spark-2", "systemctl", "start", "docker.socket", "docker")
    shows(result, "docker-down: Docker does not answer", "systemctl enable --now docker")
    assert result.output.count("docker-down") == 1


def test_a_full_disk_at_dockers_root(lab: Lab) -> None:
    steps = "systemctl stop docker.socket docker; {}; systemctl start docker.socket docker"
    mount = "mount -t tmpfs -o size=200m tmpfs /var/lib/docker"
    lab.exec("spark-2", "sh", "-c", steps.format(mount))
    try:
        result = preflight()
    finally:
        lab.exec("spark-2", "sh", "-c", steps.format("umount -l /var/lib/docker"))
    shows(result, "disk-docker: 0.2 GB free at Docker's root /var/lib/docker")


def test_no_sudo_and_no_one_to_ask(lab: Lab) -> None:
    lab.exec("spark-2", "mv", "/etc/sudoers.d/deploy", "/root/deploy.sudoers")
    try:
        result = preflight()
    finally:
        lab.exec("spark-2", "mv", "/root/deploy.sudoers", "/etc/sudoers.d/deploy")
    shows(result, "probe-failed: this ssh user may not use sudo", "--same-sudo-password")


def test_a_host_without_python(lab: Lab) -> None:
    python = lab.exec("spark-2", "readlink", "-f", "/usr/bin/python3").strip()
    lab.exec("spark-2", "chmod", "0", python)
    try:
        result = preflight()
    finally:
        lab.exec("spark-2", "chmod", "0755", python)
    shows(result, "probe-failed", "the host needs Python 3")


def test_a_wrong_key(lab: Lab, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    result = preflight(folder=tmp_path, hosts__spark_2__ssh__key=str(key))
    shows(result, "[spark-2]", "Authentication error")


def test_a_worker_that_is_down(lab: Lab) -> None:
    lab.kill("spark-2")
    try:
        result = preflight()
    finally:
        lab.start("spark-2")
    shows(result, "[spark-2]", "spark-1 cannot reach 192.168.200.13:22")


def test_another_image_on_the_worker(lab: Lab) -> None:
    image = "registry.lab:5000/vllm-cpu:lab"
    lab.exec("spark-2", "sh", "-c", f"docker tag {image} kept && docker rmi {image}")
    other = f"tar -c -C /etc hostname | docker import - {image}"
    lab.exec("spark-2", "sh", "-c", other)
    try:
        result = pyinfra("tasks/image.py")
    finally:
        # Pulled anew, it has its digest again; its layers are still here.
        restore = f"docker rmi {image}; docker tag kept {image}; docker rmi kept"
        lab.exec("spark-2", "sh", "-c", restore)
    assert result.code == 1
    assert "Traceback" not in result.output
    assert "[spark-2]" in result.output
