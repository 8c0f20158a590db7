"""The programs that run on the hosts, run here."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.remote.ray_nodes import judge
from cluster.remote.wait_unit import Progress, died
from cluster.tables import log_patterns

LOGS = Path(__file__).parent / "logs"


def run(program: str, wanted: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run a program as a host does: its text over stdin."""
    text = files("cluster.remote").joinpath(f"{program}.py").read_text(encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-", program, json.dumps(wanted)],
        input=text,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def phases(key: str) -> Progress:
    table = yaml.safe_load(files("cluster").joinpath("phases.yaml").read_text(encoding="utf-8"))
    return Progress({**table[key], **log_patterns()})


def test_every_phase_has_a_source() -> None:
    table = yaml.safe_load(files("cluster").joinpath("phases.yaml").read_text(encoding="utf-8"))
    for key in table:
        assert all(row["source"] for row in table[key]["phases"])


def test_the_phases_of_a_real_start() -> None:
    progress = phases("serve")
    lines = (LOGS / "serve-cpu-0.32.log").read_text(encoding="utf-8").splitlines()
    said = [news for line in lines if (news := progress.feed(line))]
    # Ray forwards the ranks' lines in its own order.
    assert said == [
        "vLLM 0.32.0",
        "engine starts",
        "weights 0 of 1",
        "weights 1 of 1, about 00:00 left",
        "rendezvous at 192.168.200.12:36439",
        "ranks are connected",
        "weights load",
        "weights loaded in 0.00 s",
        "KV cache of 4,194,304 tokens",
        "engine ready after 2.60 s",
        "listens",
    ]
    assert progress.ready


def test_progress_of_many_shards() -> None:
    progress = phases("serve")
    bar = (
        "(RayWorkerProc pid=7, ip=10.0.0.1) Loading safetensors checkpoint shards:  {} Completed | "
    )
    said = []
    for n in range(40):
        line = bar.format(f"{n * 100 // 39:3d}%") + f"{n}/39 [00:{n:02d}<01:10,  1.79s/it]"
        news = progress.feed(line)
        if news:
            said.append(news)
    assert said == ["weights 0 of 39, about 01:10 left", "weights 39 of 39, about 01:10 left"]
    assert progress.now() == "weights 39 of 39, about 01:10 left"


def test_the_tail_shows_what_matters() -> None:
    progress = phases("serve")
    for line in [
        "INFO 11-30 error_count=0",
        "\x1b[36mTraceback (most recent call last):\x1b[0m",
        "  File x",
        "RuntimeError: Unable to find address for: enp1s0f9",
        "INFO 11-30 shutting down",
    ]:
        progress.feed(line)
    assert progress.tail() == [
        "Traceback (most recent call last):",
        "RuntimeError: Unable to find address for: enp1s0f9",
    ]


def test_a_silent_death_shows_the_last_lines() -> None:
    progress = phases("serve")
    for number in range(50):
        progress.feed(f"line {number}")
    assert progress.tail() == [f"line {number}" for number in range(30, 50)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"InvocationID": "b"}, "started again"),
        ({"NRestarts": "1"}, "started again"),
        ({"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "3"}, "exit code 3"),
        ({"ActiveState": "activating", "SubState": "auto-restart", "Result": "success"}, "ended"),
    ],
)
def test_a_death_is_noticed(change: dict[str, str], says: str | None) -> None:
    first = {
        "InvocationID": "a",
        "NRestarts": "0",
        "ActiveState": "active",
        "SubState": "running",
        "Result": "success",
        "ExecMainStatus": "0",
    }
    why = died(first, {**first, **change})
    assert why is None if says is None else says in str(why)


def ray_node(address: str, gpus: float, alive: bool = True) -> dict[str, Any]:
    return {"NodeManagerAddress": address, "Alive": alive, "Resources": {"GPU": gpus}}


EXPECTED = {"10.0.0.1": ("head", 1.0), "10.0.0.2": ("worker", 2.0)}


def test_all_nodes_under_their_own_address() -> None:
    assert judge(EXPECTED, [ray_node("10.0.0.1", 1), ray_node("10.0.0.2", 2)]) == []


def test_a_node_under_another_address_is_named_with_it() -> None:
    problems = judge(EXPECTED, [ray_node("10.0.0.1", 1), ray_node("172.16.0.9", 2)])
    assert problems == [
        "worker is not listed under its fabric address 10.0.0.2",
        "alive under an address that cluster.yaml does not know: 172.16.0.9 "
        "(a node that took another network?)",
    ]


def test_dead_nodes_and_missing_gpus_count() -> None:
    nodes = [ray_node("10.0.0.1", 0), ray_node("10.0.0.2", 2, alive=False)]
    assert judge(EXPECTED, nodes) == [
        "head has 0 of 1 GPUs",
        "worker is not listed under its fabric address 10.0.0.2",
    ]


def reach(port: int, source: str = "127.0.0.1") -> subprocess.CompletedProcess[str]:
    return run("reach", {"address": "127.0.0.1", "port": port, "deadline": 1, "source": source})


def test_reach_says_that_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "connection refused" in reach(port).stderr


def test_reach_says_that_the_address_is_not_here() -> None:
    assert "no address 127.255.255.255" in reach(9, "127.255.255.255").stderr or (
        "no address 203.0.113.9" in reach(9, "203.0.113.9").stderr
    )


@pytest.mark.parametrize(
    ("answer", "code"),
    [(b"\x00\x00\x00\x04\x00\x00\x00\x00\x00", 0), (b"HTTP/1.1 400", 1), (b"", 1)],
)
def test_reach_tells_ray_from_another_program(answer: bytes, code: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            server.settimeout(10)
            try:
                while True:
                    peer, _ = server.accept()
                    with peer:
                        peer.recv(100)
                        peer.sendall(answer)
            except OSError:
                return

        threading.Thread(target=serve, daemon=True).start()
        result = reach(server.getsockname()[1])
    assert result.returncode == code
    assert ("not Ray" in result.stderr) == bool(code)


class Api(BaseHTTPRequestHandler):
    """An API with a model that has no chat template, behind a key."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers.get("Authorization") != "Bearer k=y":
            self.reply(401, {"error": "Unauthorized"})
        elif self.path == "/v1/chat/completions":
            self.reply(400, {"error": "the tokenizer has no chat template"})
        else:
            assert body["prompt"] == "Hi"
            answer = {"choices": [{"text": "there"}], "usage": {"completion_tokens": 1}}
            self.reply(200, answer)

    def reply(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize(("key", "says"), [("k=y", "there"), ("wrong", "HTTP 401")])
def test_completion_with_a_key_and_a_base_model(key: str, says: str, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets.env"
    secrets.write_text(f"# comment\nVLLM_API_KEY={key}\n", encoding="utf-8")
    server = HTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    wanted = {
        "host": "127.0.0.1",
        "port": server.server_port,
        "model": "m",
        "deadline": 5,
        "prompt": "Hi",
        "max_tokens": 4,
        "secrets": str(secrets),
    }
    answer = json.loads(run("completion", wanted).stdout)
    server.shutdown()
    assert says in (answer.get("text") or answer["error"])


def test_no_server_is_an_error_not_a_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    wanted = {"host": "127.0.0.1", "port": port, "model": "m", "deadline": 2, "prompt": "Hi"}
    result = run("completion", {**wanted, "max_tokens": 1, "secrets": "/no/such"})
    assert "refused" in json.loads(result.stdout)["error"]
    assert result.stderr == ""


def test_node_state_on_a_machine_without_anything(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.write_text("content\n", encoding="utf-8")
    wanted = {
        "images": ["no/such:image"],
        "containers": ["vllm-ray"],
        "units": ["vllm-ray"],
        "files": [str(ours), "/no/such"],
        "secret_files": [str(ours), "/no/such"],
        "label": "x",
        "port": None,
        "watchdog": "/no/such",
        "known_good": "/no/such",
    }
    result = run("node_state", wanted)
    state = json.loads(result.stdout)
    assert result.stderr == ""
    assert state["image"] is None
    assert state["files"] == {str(ours): "content\n", "/no/such": None}
    assert state["secret_files"][str(ours)].startswith("434728a4")
    assert state["listening"] is False
