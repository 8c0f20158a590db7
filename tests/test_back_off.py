"""remote/back_off.py: how long a container that keeps ending has to wait."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.remote.back_off import decide

PROGRAM = Path(__file__).parent.parent / "cluster" / "remote" / "back_off.py"
WANTED = {"delay": 2, "max_delay": 60, "reset_after": 60}


def waits(*lives: float, **more: Any) -> list[float]:
    """The waits of a container that lived for so many seconds, time after time."""
    memory: dict[str, Any] = {}
    now, found = 1000.0, []
    for number, life in enumerate([*lives, 0]):
        steps, wait = decide(memory, number > 0, now, {**WANTED, **more})
        found.append(wait + WANTED["delay"])
        memory = {"began": now + wait, "steps": steps}
        now += wait + life
    return found[1:]


def test_a_crash_loop_doubles_the_wait_up_to_the_longest() -> None:
    assert waits(1, 1, 1, 1, 1, 1) == [2, 4, 8, 16, 32, 60]


def test_who_ran_for_a_while_is_back_at_once() -> None:
    assert waits(1, 1, 61, 1) == [2, 4, 2, 2]
    assert waits(*[3600] * 20) == [2] * 20


def test_a_longest_wait_below_the_shortest_changes_nothing() -> None:
    assert waits(1, 1, 1, max_delay=1) == [2, 2, 2]


def start(folder: Path, restarts: int, **more: Any) -> tuple[str, float, dict[str, Any]]:
    """Run the program; return (what it says, seconds it waited, what it remembers)."""
    systemctl = folder / "systemctl"
    systemctl.write_text(f'#!/bin/sh\ntest "$4" = "" && echo NRestarts={restarts}\n')
    systemctl.chmod(0o755)
    state = folder / "state.json"
    wanted = {**WANTED, "unit": "vllm-ray.service", "state": str(state), **more}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "back_off", json.dumps(wanted)],
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout, time.monotonic() - began, json.loads(state.read_text())


@pytest.mark.parametrize("left", [None, "", "{}", "garbage"])
def test_a_start_by_a_person_or_at_boot_does_not_wait(tmp_path: Path, left: str | None) -> None:
    if left is not None:
        (tmp_path / "state.json").write_text(left)
    said, seconds, memory = start(tmp_path, restarts=0)
    assert (said, memory["steps"]) == ("", 0)
    assert seconds < 2


def test_a_restart_waits_and_remembers(tmp_path: Path) -> None:
    start(tmp_path, restarts=0, delay=1)
    assert start(tmp_path, restarts=1, delay=1)[0] == ""
    said, seconds, memory = start(tmp_path, restarts=2, delay=1)
    assert said == "it ended soon after its start, 2 in a row: waiting 1 s more\n"
    assert seconds > 1
    assert memory["steps"] == 2
    said, _, memory = start(tmp_path, restarts=3, delay=1, reset_after=0)
    assert (said, memory["steps"]) == ("", 0)
