"""Image and model on a fabric that is cut, that changes bytes, that others use and listen to."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.lab.images import NAME
from tests.test_lab import ROOT, command, environment, pyinfra, variant
from tests.test_lab_bring import (
    BIG,
    big_model,  # noqa: F401 -- the fixture `big`
    digest_of,
    end,
    forget_the_image,
    has_one_image,
    interrupted,
    listening,
)

pytestmark = [pytest.mark.lab, pytest.mark.slow]

CHANGES_A_BYTE = """
import os, socket, struct, sys, threading

os.setuid(65534)  # whose own connections are not redirected
left = [int(sys.argv[2])]
server = socket.create_server(("0.0.0.0", 19999))
print("ready", flush=True)

def pump(source, sink, is_down):
    try:
        while data := bytearray(source.recv(1 << 16)):
            if is_down and len(data) > 16384 and left[0] > 0:
                left[0] -= len(data)
                if left[0] <= 0:
                    data[1000] ^= 1
                    print("changed", flush=True)
            sink.sendall(data)
    except OSError:
        pass
    for each in (source, sink):
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

while True:
    client, _ = server.accept()
    port, address = struct.unpack(">2xH4s8x", client.getsockopt(socket.SOL_IP, 80, 16))
    try:
        there = socket.create_connection((socket.inet_ntoa(address), port), 5, (sys.argv[1], 0))
    except OSError:
        client.close()
        continue
    there.settimeout(None)
    for pair in ((client, there, False), (there, client, True)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""
REDIRECT = (
    *("OUTPUT", "-p", "tcp", "-d", "192.168.200.12", "--dport", "20000:32767"),
    *("-m", "owner", "!", "--uid-owner", "65534", "-j", "REDIRECT", "--to-ports", "19999"),
)


@contextlib.contextmanager
def a_byte_changes(lab: Lab, after: int) -> Iterator[subprocess.Popen[str]]:
    """Change a byte of what the worker receives, so many bytes after the beginning, once."""
    lab.exec("spark-2", "iptables", "-t", "nat", "-A", *REDIRECT)
    process = subprocess.Popen(
        [
            *("docker", "exec", f"{NAME}-spark-2", "python3", "-c", CHANGES_A_BYTE),
            *("192.168.200.13", str(after)),
        ],
        env=lab.engine.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        lab.exec("spark-2", "iptables", "-t", "nat", "-D", *REDIRECT)
        lab.exec("spark-2", "pkill", "-u", "65534", "-f", "19999")
        process.wait(10)


def was_changed(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    return process.stdout.read() == "changed\n"


def cut(lab: Lab, seconds: float) -> Callable[[], None]:
    """Pull the worker's cable so many seconds from now."""

    def pull() -> None:
        time.sleep(seconds)
        lab.link("spark-2", "fabric", up=False)

    return pull


def test_a_link_cut_during_the_model(lab: Lab, big: Path) -> None:
    began = time.monotonic()
    try:
        output = interrupted(big, "tasks/model.py", "Bring the model", cut(lab, 0.3))
    finally:
        lab.link("spark-2", "fabric", up=True)
    assert time.monotonic() - began < 100
    assert "[spark-2] no sign of life" in output
    assert "spark-2: no sign of life for 20 s" in output  # the sender's own word
    assert pyinfra("tasks/model.py", cluster=big).code == 0
    assert digest_of(lab, "spark-1", BIG) == digest_of(lab, "spark-2", BIG)
    assert [listening(lab, host) for host in lab.hosts] == [set(), set()]


def test_a_link_cut_during_the_image(lab: Lab, tmp_path: Path) -> None:
    forget_the_image(lab)
    cluster = variant(tmp_path)
    try:
        output = interrupted(cluster, "tasks/image.py", "Relay the image", cut(lab, 2))
    finally:
        lab.link("spark-2", "fabric", up=True)
    assert "[spark-2] no sign of life" in output
    assert "vllm-cpu" not in lab.exec("spark-2", "docker", "images", "--format", "{{.Repository}}")
    assert pyinfra("tasks/image.py", cluster=cluster).code == 0
    assert has_one_image(lab)


def test_a_byte_of_the_model_that_changes_is_sent_again(lab: Lab, big: Path) -> None:
    with a_byte_changes(lab, 20_000_000) as process:
        assert pyinfra("tasks/model.py", cluster=big).code == 0
    assert was_changed(process)
    assert digest_of(lab, "spark-1", BIG) == digest_of(lab, "spark-2", BIG)


def test_a_byte_of_the_image_that_changes_is_refused(lab: Lab, tmp_path: Path) -> None:
    forget_the_image(lab)
    cluster = variant(tmp_path)
    with a_byte_changes(lab, 20_000_000) as process:
        result = pyinfra("tasks/image.py", cluster=cluster)
    assert was_changed(process)
    assert result.code == 1
    assert "what arrived is not what was sent" in result.output
    assert "vllm-cpu" not in lab.exec("spark-2", "docker", "images", "--format", "{{.Repository}}")
    assert pyinfra("tasks/image.py", cluster=cluster).code == 0


def test_two_clusters_relay_at_the_same_time(lab: Lab, big: Path, tmp_path: Path) -> None:
    other = "/srv/models/other"
    lab.exec("spark-1", "cp", "-al", BIG, other)
    (tmp_path / "other").mkdir()
    files = [big, variant(tmp_path / "other", name="other", model=other)]
    try:
        runs = [
            subprocess.Popen(
                command("tasks/model.py"),
                cwd=ROOT,
                env=environment(file),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for file in files
        ]
        outputs = [run.communicate(timeout=300)[0] for run in runs]
        assert [run.returncode for run in runs] == [0, 0], "\n".join(outputs)
        digests = {digest_of(lab, host, path) for host in lab.hosts for path in (BIG, other)}
        assert len(digests) == 1
    finally:
        for host in lab.hosts:
            lab.exec(host, "rm", "-rf", other)


def test_encrypted(lab: Lab, big: Path, tmp_path: Path) -> None:
    forget_the_image(lab)
    (tmp_path / "encrypted").mkdir()
    cluster = variant(tmp_path / "encrypted", model=BIG, encrypt=True)
    for task in ("tasks/image.py", "tasks/model.py"):
        result = pyinfra(task, cluster=cluster)
        assert result.code == 0
    assert digest_of(lab, "spark-1", BIG) == digest_of(lab, "spark-2", BIG)
    assert has_one_image(lab)


@pytest.mark.parametrize("host", ["spark-1", "spark-2"])
def test_encrypted_and_killed(lab: Lab, big: Path, tmp_path: Path, host: str) -> None:
    (tmp_path / "encrypted").mkdir()
    cluster = variant(tmp_path / "encrypted", model=BIG, encrypt=True)
    interrupted(cluster, "tasks/model.py", "Bring the model", lambda: end(lab, host, "relay", 0.5))
    assert pyinfra("tasks/model.py", cluster=cluster).code == 0
    assert digest_of(lab, "spark-1", BIG) == digest_of(lab, "spark-2", BIG)
