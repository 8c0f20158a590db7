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

    counts: list[int]

    def do_GET(self) -> None:
        count = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(
            f'vllm:num_requests_running{{model_name="m"}} {count}.0\n'
            'vllm:num_requests_waiting{model_name="m"} 0.0\n'.encode()
        )

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def drain(
    folder: Path, port: int, docker: str = "exit 0", **more: Any
) -> tuple[str, list[str], float]:
    """Return (what it says, its docker commands, seconds)."""
    fake = folder / "docker"
    fake.write_text(f'#!/bin/sh\necho "$@" >> "$(dirname "$0")/calls"\n{docker}\n')
    fake.chmod(0o755)
    wanted = {
        **{"container": "vllm-serve", "host": "127.0.0.1", "port": port},
        **{"refuses": True, "drain": 5, "stop": 60, **more},
    }
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "drain", json.dumps(wanted)],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
    )
    return done.stdout, (folder / "calls").read_text().splitlines(), time.monotonic() - began


def test_it_waits_for_the_running_requests(tmp_path: Path, server: HTTPServer) -> None:
    Server.counts = [3, 1, 1, 0]
    said, calls, seconds = drain(tmp_path, server.server_port)
    assert said.splitlines() == [
        "3 requests still run",
        "1 requests still run",
        "no request runs",
    ]
    assert calls == ["kill --signal=TERM vllm-serve", "stop -t 5 vllm-serve"]
    assert 1 < seconds < 4


def test_a_deadline_ends_the_wait(tmp_path: Path, server: HTTPServer) -> None:
    Server.counts = [1]
    said, calls, _ = drain(tmp_path, server.server_port, drain=1)
    assert "requests still run after 1 s" in said
    assert calls[-1] == "stop -t 5 vllm-serve"


def test_a_container_that_has_ended_by_itself_is_not_waited_for(
    tmp_path: Path, server: HTTPServer
) -> None:
    Server.counts = [1]
    said, calls, seconds = drain(tmp_path, server.server_port, docker="exit 1")
    assert said == ""
    assert calls == ["kill --signal=TERM vllm-serve"]
    assert seconds < 1


def test_a_dead_server_is_not_waited_for(tmp_path: Path) -> None:
    said, calls, seconds = drain(tmp_path, 9)
    assert said == "the server does not answer\n"
    assert calls[-1] == "stop -t 5 vllm-serve"
    assert seconds < 1


def test_an_older_vllm_is_stopped_only_when_it_is_idle(tmp_path: Path, server: HTTPServer) -> None:
    Server.counts = [1, 0]
    _, calls, _ = drain(tmp_path, server.server_port, refuses=False)
    assert calls == ["stop -t 60 vllm-serve"]
