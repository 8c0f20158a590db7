"""The watchdog: what counts as wedged, and when it may restart."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from cluster.remote.watchdog import decide, judge

SETTINGS = {"failures": 3, "minimum_uptime": 600, "cool_down": 900, "restarts_per_hour": 2}


@pytest.mark.parametrize(
    ("error", "before", "after", "verdict"),
    [
        (None, None, None, "healthy"),
        ("timed out", 100.0, 100.0, "wedged"),
        ("timed out", None, None, "wedged"),
        ("timed out", 100.0, 250.0, "healthy"),
        ("HTTP 500: EngineCore encountered an issue", 5.0, 5.0, "wedged"),
        ("HTTP 503: dead", None, None, "wedged"),
        ("HTTP 401: Unauthorized", None, None, "unknown"),
        ("HTTP 404: The model `x` does not exist", None, None, "unknown"),
        ("HTTP 429: too many", None, None, "unknown"),
        ("[Errno 111] Connection refused", None, None, "unknown"),
        ("[Errno 104] Connection reset by peer", None, None, "wedged"),
    ],
)
def test_a_wedge_is_told_from_not_being_able_to_ask(
    error: str | None, before: float | None, after: float | None, verdict: str
) -> None:
    answer: dict[str, Any] = {"seconds": 30.0, **({"error": error} if error else {"text": "x"})}
    assert judge(answer, before, after)[0] == verdict


def run(verdicts: list[tuple[float, str]], uptime: float = 10_000) -> list[tuple[float, str]]:
    """Play verdicts at their times (seconds); return what was done and when."""
    memory: dict[str, Any] = {}
    done = []
    for now, verdict in verdicts:
        memory, action = decide(memory, verdict, now, uptime, SETTINGS)
        if action != "nothing":
            done.append((now, action))
    return done


def every_minute(verdict: str, minutes: int, begin: int = 0) -> list[tuple[float, str]]:
    return [(60.0 * minute, verdict) for minute in range(begin, begin + minutes)]


def test_three_failures_in_a_row_restart() -> None:
    assert run(every_minute("wedged", 3)) == [(120.0, "restart")]


def test_two_failures_do_not() -> None:
    verdicts = ["wedged", "wedged", "healthy", "wedged", "wedged"]
    assert run([(60.0 * index, verdict) for index, verdict in enumerate(verdicts)]) == []


def test_not_being_able_to_ask_changes_nothing() -> None:
    assert run(every_minute("unknown", 100)) == []
    assert run([(0, "wedged"), (60, "wedged"), (120, "unknown"), (180, "wedged")]) == [
        (180, "restart")
    ]


def test_a_young_server_is_left_alone() -> None:
    assert run(every_minute("wedged", 4), uptime=100) == [(120.0, "wait"), (180.0, "wait")]


def test_the_second_restart_waits_and_takes_the_group_then_it_gives_up() -> None:
    done = run(every_minute("wedged", 60))
    assert [step for step in done if "restart" in step[1]] == [
        (120.0, "restart"),
        (1020.0, "restart group"),
    ]
    assert done[-1][1] == "give up"


def test_an_hour_later_it_tries_again() -> None:
    done = run(every_minute("wedged", 120))
    assert [step[0] for step in done if step[1].startswith("restart")] == [120, 1020, 3720, 4620]


def test_a_server_that_never_answers_is_a_failure(tmp_path: Path) -> None:
    """The program itself, against a port that takes calls and says nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for program in ("watchdog", "completion"):
        text = files("cluster.remote").joinpath(f"{program}.py").read_text(encoding="utf-8")
        (folder / f"{program}.py").write_text(text, encoding="utf-8")
    (folder / "systemctl").write_text(
        "#!/bin/sh\n"
        'echo "$@" >> "$(dirname "$0")/calls"\n'
        "echo ActiveState=active\necho ActiveEnterTimestampMonotonic=0\n",
        encoding="utf-8",
    )
    (folder / "systemctl").chmod(0o755)
    (folder / "docker").write_text('#!/bin/sh\necho docker "$@" >> "$(dirname "$0")/calls"\n')
    (folder / "docker").chmod(0o755)
    server = socket.create_server(("127.0.0.1", 0))
    kept = []
    threading.Thread(
        target=lambda: [kept.append(server.accept()) for _ in range(20)], daemon=True
    ).start()
    wanted = {
        "completion": {
            **{"host": "127.0.0.1", "port": server.getsockname()[1], "model": "m", "deadline": 0.3},
            **{"prompt": "Hi", "max_tokens": 1, "secrets": "/no/such"},
        },
        **{"unit": "vllm-serve.service", "container": "vllm-serve"},
        "group_unit": "vllm-ray.service",
        **{"state": str(tmp_path / "state.json"), **SETTINGS, "failures": 2, "minimum_uptime": 0},
    }
    outputs = [
        subprocess.run(
            [sys.executable, str(folder / "watchdog.py"), "watchdog", json.dumps(wanted)],
            env={"PATH": f"{folder}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert "failure 1 in a row, 2 restart" in outputs[0]
    assert "restarting vllm-serve.service" in outputs[1]
    calls = (folder / "calls").read_text(encoding="utf-8")
    assert "docker kill vllm-serve\nrestart --no-block vllm-serve.service" in calls
    assert calls.count("restart --no-block vllm-serve.service") == 1
