"""What tasks/status.py says: of hosts as they should be, and of each thing that is not so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.remote.node_state import last_failure
from cluster.status import duration
from cluster.tables import log_patterns
from tests.conftest import Pyinfra
from tests.fleet import Fleet

PATTERNS = log_patterns()


def status(run: Pyinfra) -> tuple[int, dict[str, Any]]:
    result = run("-y", "tasks/status.py", "--data", "json=true")
    line = next(line for line in result.output.splitlines() if line.startswith('{"serves"'))
    return result.exit_code, json.loads(line)


def test_a_cluster_that_serves(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    code, found = status(run)
    assert code == 0
    assert found["serves"] is True
    assert [host["host"] for host in found["hosts"]] == ["@fake/spark-1", "@fake/spark-2"]
    layers = [layer for host in found["hosts"] for layer in host["layers"]]
    assert [layer["layer"] for layer in layers] == ["vllm-ray", "vllm-serve", "vllm-ray"]
    assert all(layer["current"] and layer["at_boot"] and layer["wanted"] for layer in layers)
    assert [host["stale_files"] for host in found["hosts"]] == [[], []]


def test_one_command_per_host_and_the_question(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    result = run("-y", "tasks/status.py")
    asked = {name: len(commands) for name, commands in result.commands.items()}
    # The plan is made from one look; what is shown comes from a second one.
    assert asked == {"spark-1": 3, "spark-2": 2}


def test_what_a_deploy_would_change_is_named(run: Pyinfra, fleet: Fleet, tmp_path: Path) -> None:
    run("-y", "deploy.py")
    fleet["spark-2"].running["vllm-ray"] = "0000000000000000"
    fleet["spark-2"].files["/etc/vllm/node.env"] += "# by hand\n"
    result = run("-y", "tasks/status.py")
    assert result.exit_code == 0  # a token came back
    assert "no: a deploy would restart it" in " ".join(result.output.split())
    assert "spark-2: a deploy would write node.env" in result.output


def test_without_a_token_the_exit_code_is_1(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    fleet["spark-1"].completion = {"error": "HTTP 500: engine died", "seconds": 0.2}
    code, found = status(run)
    assert code == 1
    assert found["serves"] is False
    assert found["answer"]["error"] == "HTTP 500: engine died"
    assert "tasks/restart.py" in run("-y", "tasks/status.py").output


def test_the_head_alone_can_be_asked(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    assert run("-y", "tasks/status.py", "--limit", "head").exit_code == 0
    result = run("-y", "tasks/status.py", "--limit", "workers")
    assert result.exit_code == 1
    assert "takes no part in this run" in result.output


def entry(identifier: str, message: str | list[int], second: int = 0) -> bytes:
    stamp = str(1_000_000 * (1_700_000_000 + second))
    row = {"SYSLOG_IDENTIFIER": identifier, "MESSAGE": message, "__REALTIME_TIMESTAMP": stamp}
    return json.dumps(row).encode()


def failure(*entries: bytes) -> dict[str, Any] | None:
    return last_failure(b"\n".join(entries), PATTERNS["matters"], PATTERNS["noise"])


def test_the_last_failure_has_the_line_before_it_that_matters() -> None:
    found = failure(
        entry("docker", "INFO error_count=0"),
        entry("docker", "RuntimeError: no KV cache"),
        entry("docker", "INFO shutting down"),
        entry("docker", "Error: No such container: vllm-serve"),
        entry("systemd", "vllm-serve.service: Main process exited, code=exited, status=1/FAILURE"),
        entry("systemd", "vllm-serve.service: Failed with result 'exit-code'."),
        entry("systemd", "vllm-serve.service: Scheduled restart job, restart counter is at 1."),
        entry("systemd", "Starting vllm-serve.service - vllm serve..."),
        entry("docker", "Error: No such container: vllm-serve"),
        entry("docker", "INFO all is well"),
    )
    assert found is not None
    assert found["how"] == "Main process exited, code=exited, status=1/FAILURE"
    assert found["reason"] == "RuntimeError: no KV cache"


def test_an_end_with_code_0_is_a_failure_too() -> None:
    """vllm serve ends with 0 after the death of its engine."""
    found = failure(
        entry("docker", list(b"\x1b[31mEngineDeadError\x1b[0m")),
        entry("systemd", "vllm-serve.service: Deactivated successfully."),
        entry("systemd", "vllm-serve.service: Scheduled restart job, restart counter is at 1."),
    )
    assert found is not None
    assert (found["how"], found["reason"]) == ("Deactivated successfully", "EngineDeadError")


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [entry("systemd", "Started vllm-serve.service."), entry("docker", "ERROR one bad request")],
        # A stop that was wanted: nothing schedules a restart.
        [entry("systemd", "vllm-serve.service: Deactivated successfully.")],
        [b"not JSON"],
    ],
)
def test_no_failure(entries: list[bytes]) -> None:
    assert failure(*entries) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3661, "1 h 1 min"), (90061, "1 d 1 h")],
)
def test_durations(seconds: int, text: str) -> None:
    assert duration(seconds) == text
