"""remote/drain.py against a server that counts its requests, and a docker that takes notes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent.parent / "cluster" / "remote" / "drain.py"


class Server(BaseHTTPRequestHandler):
    """/metrics of vLLM."""

    protocol_version = "HTTP/1.1"
    counts: list[int]

    def do_GET(self) -> None:
        count = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
        body = (
            f'vllm:num_requests_running{{model_name="m"}} {count}.0\n'
            'vllm:num_requests_waiting{model_name="m"} 0.0\n'
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def drain(
    folder: Path, port: int, docker: str = "exit 0", role: str = "drain", **more: Any
) -> tuple[str, list[str], float]:
    """Return (what it says, its docker and iptables commands, seconds)."""
    for name, does in (("docker", docker), ("iptables", FAKE_IPTABLES)):
        fake = folder / name
        fake.write_text(f'#!/bin/sh\ncd "$(dirname "$0")"\necho "{name} $*" >> calls\n{does}\n')
        fake.chmod(0o755)
    wanted = {
        **{"container": "vllm-serve", "host": "127.0.0.1", "port": port},
        **{"refuses": True, "drain": 5, "stop": 60, **more},
    }
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), role, json.dumps(wanted)],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
    )
    return done.stdout, (folder / "calls").read_text().splitlines(), time.monotonic() - began


FAKE_IPTABLES = """
case "$3" in
-I) touch rule ;;
-D) rm rule ;;
esac 2>/dev/null
"""
DOOR = "-p tcp --dport {} --syn -m comment --comment vllm serve is being stopped -j REJECT"


def test_it_waits_for_the_running_requests(tmp_path: Path, server: HTTPServer) -> None:
    Server.counts = [3, 1, 1, 0]
    said, calls, seconds = drain(tmp_path, server.server_port)
    assert said.splitlines() == [
        "3 requests still run",
        "1 requests still run",
        "no request runs",
    ]
    assert calls == ["docker kill --signal=TERM vllm-serve", "docker stop -t 5 vllm-serve"]
    assert 1 < seconds < 4


def test_a_deadline_ends_the_wait(tmp_path: Path, server: HTTPServer) -> None:
    Server.counts = [1]
    said, calls, _ = drain(tmp_path, server.server_port, drain=1)
    assert "requests still run after 1 s" in said
    assert calls[-1] == "docker stop -t 5 vllm-serve"


def test_a_container_that_has_ended_by_itself_is_not_waited_for(
    tmp_path: Path, server: HTTPServer
) -> None:
    Server.counts = [1]
    said, calls, seconds = drain(tmp_path, server.server_port, docker="exit 1")
    assert said == ""
    assert calls == ["docker kill --signal=TERM vllm-serve"]
    assert seconds < 1


def test_a_dead_server_is_not_waited_for(tmp_path: Path) -> None:
    said, calls, seconds = drain(tmp_path, 9)
    assert said == "the server does not answer\n"
    assert calls[-1] == "docker stop -t 5 vllm-serve"
    assert seconds < 1


def test_an_older_vllm_is_stopped_when_it_is_idle_and_nobody_comes_in_meanwhile(
    tmp_path: Path, server: HTTPServer
) -> None:
    Server.counts = [1, 1, 0]
    _, calls, _ = drain(tmp_path, server.server_port, refuses=False)
    door = DOOR.format(server.server_port)
    assert [" ".join(call.split()[:5]) for call in calls] == [
        "iptables -w 5 -I INPUT",
        "docker stop -t 60 vllm-serve",
        "iptables -w 5 -D INPUT",
    ]
    assert door in calls[0]
    assert door in calls[2]
    assert not (tmp_path / "rule").exists()


def test_what_a_killed_drain_has_closed_is_opened_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "rule").touch()
    said, calls, _ = drain(tmp_path, 8000, role="open", refuses=False)
    assert "a former drain was killed" in said
    assert len(calls) == 2
    assert not (tmp_path / "rule").exists()
