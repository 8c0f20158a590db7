"""The ranks of executor mp come together before each start, and end together: remote/gather.py.

Real processes on loopback; only systemctl and docker are played. torch's store is one that listens
as torch's does and says nothing, a rank one that stays connected to it.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent.parent / "cluster" / "remote" / "gather.py"
HEAD, WORKERS = "127.0.0.1", {"127.0.0.2": "spark-2", "127.0.0.3": "spark-3"}
ANY = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
"""Where torch's store listens."""
CALLS_FROM = [20000, 20999]
"""As on the hosts none that the kernel gives by itself, but open to those who are not root."""
STORE = """
import selectors, socket, sys
host, port = sys.argv[1], int(sys.argv[2])
family = socket.AF_INET6 if ":" in host else socket.AF_INET
server = socket.create_server((host, port), family=family, dualstack_ipv6=":" in host)
selector = selectors.DefaultSelector()
selector.register(server, selectors.EVENT_READ)
print("listens", flush=True)
while True:
    for key, _ in selector.select():
        if key.fileobj is server:
            selector.register(server.accept()[0], selectors.EVENT_READ)
        elif not key.fileobj.recv(100):
            selector.unregister(key.fileobj)
            key.fileobj.close()
"""
RANK = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5, (sys.argv[3], 0))
print("connected", flush=True)
time.sleep(100)
"""
Process = subprocess.Popen[str]


@pytest.fixture
def port() -> int:
    """Free at every address, as torch's store needs it."""
    family = socket.AF_INET6 if ":" in ANY else socket.AF_INET
    with socket.create_server((ANY, 0), family=family, dualstack_ipv6=":" in ANY) as server:
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
    return started("worker", port, **{"source": address, "calls_from": CALLS_FROM, **more})


@contextlib.contextmanager
def running(program: str, *arguments: object) -> Iterator[Process]:
    argv = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(argv, text=True, stdout=subprocess.PIPE) as process:
        try:
            says(process, "\n")
            yield process
        finally:
            process.kill()


def store(port: int, address: str = ANY) -> contextlib.AbstractContextManager[Process]:
    return running(STORE, address, port)


def rank(port: int, address: str) -> contextlib.AbstractContextManager[Process]:
    return running(RANK, HEAD, port, address)


def ends(process: Process) -> tuple[int, str]:
    output = process.communicate(timeout=20)[0]
    return process.returncode, output


def says(process: Process, text: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert text in line


def tools(folder: Path, active: bool = True, invocation: str = "1") -> Path:
    """A systemctl and a docker that write down how they were called."""
    state = f"ActiveState={'active' if active else 'activating'}\nInvocationID={invocation}"
    (folder / "systemctl").write_text(f"#!/bin/sh\necho '{state}'\n")
    (folder / "docker").write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/calls"\n')
    for name in ("systemctl", "docker"):
        (folder / name).chmod(0o755)
    return folder


@contextlib.contextmanager
def watching(role: str, port: int, folder: Path, **more: Any) -> Iterator[Process]:
    unit = {"unit": "vllm-serve.service", "container": "vllm-serve"}
    path = f"{folder}:/usr/bin:/bin"
    with started(f"watch-{role}", port, path=path, **unit, **more) as process:
        yield process


def watch(port: int, folder: Path) -> str:
    """Let a worker look once; return what it did to its container."""
    with watching("worker", port, folder, source="127.0.0.2") as process:
        ends(process)
    return done(folder)


def watch_head(port: int, folder: Path) -> contextlib.AbstractContextManager[Process]:
    more = {"workers": WORKERS, "calls_from": CALLS_FROM, "state": str(folder / "state.json")}
    return watching("head", port, folder, **more)


def look(port: int, folder: Path) -> tuple[str, str]:
    """Let the head look once; return what it said, and what was done to its container."""
    with watch_head(port, folder) as process:
        code, output = ends(process)
    assert code == 0
    return output, done(folder)


def looks(port: int, folder: Path) -> list[tuple[str, str]]:
    """Let the head look three times, with the seconds between them that its timer takes."""
    found = []
    for _ in range(3):
        found.append(look(port, folder))
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        for row in state["connections"]:
            row[2] -= 5
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    return found


def done(folder: Path) -> str:
    calls = folder / "calls"
    return calls.read_text(encoding="utf-8") if calls.exists() else ""


NOTHING = ("", "")
KILLED = "kill vllm-serve\n"


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
    """It waits on the port of the group's store, and joins the head that has the port next."""
    with store(port) as group, worker(port, "127.0.0.2") as second:
        says(second, "a group without this rank still runs")
        group.kill()
        says(second, "the head does not answer")
        with head(port, workers={"127.0.0.2": "spark-2"}) as first:
            assert [ends(each)[0] for each in (first, second)] == [0, 0]


def test_a_worker_does_not_call_from_a_port_that_is_taken(port: int) -> None:
    first, workers = CALLS_FROM[1] + 1, {"127.0.0.2": "spark-2"}
    with socket.create_server(("127.0.0.2", first)), head(port, workers=workers):
        with worker(port, "127.0.0.2", calls_from=[first, first]) as second:
            says(second, "none of the ports to call from is free")
        with worker(port, "127.0.0.2", calls_from=[first, first + 9]) as second:
            assert ends(second)[0] == 0


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
        assert watch(port, tools(tmp_path)) == KILLED
        time.sleep(0.1)
        assert first.poll() is None


def test_a_rank_is_left_alone_while_its_group_runs(port: int, tmp_path: Path) -> None:
    folder = tools(tmp_path)
    assert watch(port, folder) == ""  # the head is down
    with store(port):
        assert watch(port, folder) == ""


def test_a_rank_that_waits_is_left_alone(port: int, tmp_path: Path) -> None:
    with head(port) as first:
        says(first, "waiting")
        assert watch(port, tools(tmp_path, active=False)) == ""


@pytest.mark.parametrize(
    ("address", "gone"), [(ANY, "127.0.0.2"), ("0.0.0.0", "127.0.0.3"), (HEAD, "127.0.0.2")]
)
def test_the_head_ends_with_the_rank_of_a_worker(
    port: int, tmp_path: Path, address: str, gone: str
) -> None:
    """Its kernel knows, whatever its own rank is at."""
    folder = tools(tmp_path)
    with store(port, address) as group, contextlib.ExitStack() as stack:
        ranks = {each: stack.enter_context(rank(port, each)) for each in WORKERS}
        assert looks(port, folder) == [NOTHING] * 3
        group.send_signal(signal.SIGSTOP)
        ranks[gone].kill()
        ranks[gone].wait()
        said = f"<5>the rank of {WORKERS[gone]} has ended; the group starts anew\n"
        assert look(port, folder) == (said, KILLED)


def test_the_head_ends_for_a_rank_that_waits(port: int, tmp_path: Path) -> None:
    """Its connection stands on the head even where that of the former one does still: the power of
    the worker was cut.
    """
    with store(port), rank(port, "127.0.0.2"), worker(port, "127.0.0.2") as second:
        says(second, "a group without this rank still runs")
        said = "<5>the rank of spark-2 waits to be gathered; the group starts anew\n"
        assert look(port, tools(tmp_path)) == (said, KILLED)


def test_the_head_is_left_alone_while_its_group_starts(port: int, tmp_path: Path) -> None:
    """No store yet, no rank yet, and the watch of a worker looks now and then."""
    folder, other = tools(tmp_path), tmp_path / "worker"
    other.mkdir()
    tools(other)
    assert look(port, folder) == NOTHING
    over = threading.Event()

    def look_often() -> None:
        while not over.wait(3):
            watch(port, other)

    with store(port):
        watches = threading.Thread(target=look_often)
        watches.start()
        try:
            end = time.monotonic() + 10
            while time.monotonic() < end:  # far more often than its timer lets it
                assert look(port, folder) == NOTHING
        finally:
            over.set()
            watches.join()
        assert done(other) == ""
        with rank(port, "127.0.0.2"):
            assert looks(port, folder) == [NOTHING] * 3


def test_what_one_look_alone_has_seen_does_not_count(port: int, tmp_path: Path) -> None:
    folder = tools(tmp_path)
    with store(port):
        with rank(port, "127.0.0.2"):
            assert look(port, folder) == NOTHING
        assert look(port, folder) == NOTHING
        with worker(port, "127.0.0.2") as second:
            says(second, "a group without this rank still runs")
            (folder / "state.json").unlink()
            with watch_head(port, folder) as process:
                while not (folder / "state.json").exists():  # its first look
                    time.sleep(0.01)
                second.kill()
                assert ends(process) == (0, "")
    assert done(folder) == ""


def test_one_of_several_ranks_of_a_worker_is_its_own_hosts_matter(
    port: int, tmp_path: Path
) -> None:
    folder = tools(tmp_path)
    with store(port), rank(port, "127.0.0.2"):
        with rank(port, "127.0.0.2"):
            assert looks(port, folder) == [NOTHING] * 3
        assert look(port, folder) == NOTHING


def test_another_start_of_the_head_knows_nothing_of_the_former_one(
    port: int, tmp_path: Path
) -> None:
    with store(port):
        with rank(port, "127.0.0.2"):
            assert looks(port, tools(tmp_path)) == [NOTHING] * 3
        assert look(port, tools(tmp_path, invocation="2")) == NOTHING
        assert look(port, tools(tmp_path, invocation="2")) == NOTHING


def test_a_head_that_gathers_or_stops_is_left_alone(port: int, tmp_path: Path) -> None:
    with store(port):
        with rank(port, "127.0.0.2"):
            assert looks(port, tools(tmp_path)) == [NOTHING] * 3
        with worker(port, "127.0.0.2") as second:
            says(second, "a group without this rank still runs")
            assert look(port, tools(tmp_path, active=False)) == NOTHING


def test_strangers_end_no_group(port: int, tmp_path: Path) -> None:
    folder = tools(tmp_path)
    with store(port):
        with rank(port, "127.0.0.9"):
            assert looks(port, folder) == [NOTHING] * 3
        with socket.create_connection((HEAD, port), 5, ("127.0.0.9", CALLS_FROM[0])) as stranger:
            # It leaves at once, so that its port is free for the next run of this test.
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            assert look(port, folder) == NOTHING
