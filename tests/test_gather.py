"""The ranks of executor mp come together before each start: remote/gather.py on loopback."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent.parent / "cluster" / "remote" / "gather.py"
HEAD, WORKERS = "127.0.0.1", {"127.0.0.2": "spark-2", "127.0.0.3": "spark-3"}
Process = subprocess.Popen[str]


@pytest.fixture
def port() -> int:
    with socket.create_server((HEAD, 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def started(role: str, port: int, **more: Any) -> Iterator[Process]:
    wanted = {"port": port, "head": HEAD, "deadline": 20, **more}
    argv = [sys.executable, str(PROGRAM), role, json.dumps(wanted)]
    environment = {"PATH": str(more.pop("path", "/usr/bin:/bin"))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(argv, text=True, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def head(port: int, **more: Any) -> contextlib.AbstractContextManager[Process]:
    return started("head", port, **{"workers": WORKERS, **more})


def worker(port: int, address: str, **more: Any) -> contextlib.AbstractContextManager[Process]:
    return started("worker", port, source=address, **more)


def ends(process: Process) -> tuple[int, str]:
    output = process.communicate(timeout=20)[0]
    return process.returncode, output


def says(process: Process, text: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert text in line


def tools(folder: Path, active: bool) -> Path:
    """A systemctl and a docker that write down how they were called."""
    (folder / "systemctl").write_text(f"#!/bin/sh\nexit {0 if active else 3}\n")
    (folder / "docker").write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/calls"\n')
    for name in ("systemctl", "docker"):
        (folder / name).chmod(0o755)
    return folder


def watch(port: int, folder: Path) -> str:
    more = {"source": "127.0.0.2", "unit": "vllm-serve.service", "container": "vllm-serve"}
    with started("watch", port, path=f"{folder}:/usr/bin:/bin", **more) as process:
        ends(process)
    calls = folder / "calls"
    return calls.read_text(encoding="utf-8") if calls.exists() else ""


def test_all_start_when_the_last_one_has_come(port: int) -> None:
    with head(port) as first, worker(port, "127.0.0.2") as second:
        says(first, "waiting for the ranks of spark-2 (127.0.0.2), spark-3 (127.0.0.3)")
        says(first, "waiting for the ranks of spark-3 (127.0.0.3)")
        assert second.poll() is None
        with worker(port, "127.0.0.3") as third:
            assert [ends(each)[0] for each in (first, second, third)] == [0, 0, 0]


def test_a_worker_that_has_gone_again_counts_as_absent(port: int) -> None:
    with head(port) as first:
        with worker(port, "127.0.0.2"):
            says(first, "spark-2 (127.0.0.2), spark-3")
            says(first, "ranks of spark-3")
        says(first, "spark-2 (127.0.0.2), spark-3")


def test_a_worker_waits_for_a_head_that_is_not_there_yet(port: int) -> None:
    with worker(port, "127.0.0.2") as second:
        says(second, f"the head does not answer at {HEAD}:{port}: Connection refused")
        with head(port, workers={"127.0.0.2": "spark-2"}):
            assert ends(second)[0] == 0


def test_a_worker_waits_for_the_end_of_a_group_without_it(port: int) -> None:
    """torch's store has the port, and says nothing until it is asked."""
    with socket.create_server((HEAD, port)), worker(port, "127.0.0.2") as second:
        says(second, "a group without this rank still runs")


def test_strangers_neither_count_nor_disturb(port: int) -> None:
    with head(port, workers={"127.0.0.2": "spark-2"}) as first:
        says(first, "waiting for")
        with socket.create_connection((HEAD, port), 5, ("127.0.0.9", 0)) as stranger:
            stranger.sendall(b"join\n")
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(10) == b""
        assert first.poll() is None
        with worker(port, "127.0.0.2"):
            assert ends(first)[0] == 0


def test_the_deadline_names_who_is_missing(port: int) -> None:
    with head(port, deadline=1) as first:
        code, output = ends(first)
    assert code == 1
    assert "no rank from spark-2 (127.0.0.2), spark-3 (127.0.0.3) within 1 s" in output


def test_a_rank_of_the_former_group_is_ended(port: int, tmp_path: Path) -> None:
    with head(port) as first:
        says(first, "waiting")
        assert watch(port, tools(tmp_path, active=True)) == "kill vllm-serve\n"
        time.sleep(0.1)
        assert first.poll() is None


def test_a_rank_is_left_alone_while_its_group_runs(port: int, tmp_path: Path) -> None:
    folder = tools(tmp_path, active=True)
    assert watch(port, folder) == ""  # the head is down
    with socket.create_server((HEAD, port)):
        assert watch(port, folder) == ""  # torch's store


def test_a_rank_that_waits_is_left_alone(port: int, tmp_path: Path) -> None:
    with head(port) as first:
        says(first, "waiting")
        assert watch(port, tools(tmp_path, active=False)) == ""
