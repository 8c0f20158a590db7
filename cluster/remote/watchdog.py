"""Asks vllm serve for one token and restarts it when it is wedged; a timer runs this on the head.

Argument (JSON): completion (the argument of completion.py, which lies beside this file), unit,
container, group_unit, state (path of a JSON file that survives until a reboot), failures,
minimum_uptime, cool_down (seconds), restarts_per_hour.

/health says 200 over a dead engine, so only a token counts. Not being able to ask (wrong key, port
closed, another model) is no wedge, and neither is an engine that is busy: its token counters grow.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import subprocess
import sys
import time
from typing import Any, Dict, Tuple

HOUR = 3600
REFUSALS = re.compile(r"HTTP 4\d\d|refused")


def judge(answer: Dict[str, Any], before: float | None, after: float | None) -> Tuple[str, str]:
    """Return ("healthy" | "unknown" | "wedged", why) for an answer and the token counters."""
    error = answer.get("error")
    if not error:
        return "healthy", "a token came back in %s s" % answer["seconds"]
    if REFUSALS.search(error):
        return "unknown", "cannot ask: %s" % error
    if before is not None and after is not None and after > before:
        return "healthy", "busy: %d tokens since the question" % (after - before)
    return "wedged", "no token in %s s: %s" % (answer["seconds"], error)


def decide(
    memory: Dict[str, Any], verdict: str, now: float, uptime: float, wanted: Dict[str, Any]
) -> Tuple[Dict[str, Any], str]:
    """Return (the new memory, "nothing" | "wait" | "restart" | "restart group" | "give up")."""
    restarts = [moment for moment in memory.get("restarts", []) if now - moment < HOUR]
    failures = memory.get("failures", 0)
    failures = {"healthy": 0, "wedged": failures + 1}.get(verdict, failures)
    memory = {"failures": failures, "restarts": restarts}
    if failures < wanted["failures"]:
        return memory, "nothing"
    if len(restarts) >= wanted["restarts_per_hour"]:
        return memory, "give up"
    if uptime < wanted["minimum_uptime"] or (restarts and now - restarts[-1] < wanted["cool_down"]):
        return memory, "wait"
    # What a restart of vllm serve alone did not cure may sit in Ray or on a worker.
    action = "restart group" if restarts else "restart"
    return {"failures": 0, "restarts": [*restarts, now]}, action


def tokens(metrics: Dict[str, float]) -> float | None:
    """All tokens so far, read and written; None where /metrics does not answer."""
    if not metrics:
        return None
    return metrics.get("generation_tokens_total", 0) + metrics.get("prompt_tokens_total", 0)


def uptime(unit: str) -> float | None:
    """Seconds since a unit has become active, or None where it is not."""
    out = subprocess.run(
        ["systemctl", "show", "--property=ActiveState,ActiveEnterTimestampMonotonic", unit],
        stdout=subprocess.PIPE,
    ).stdout.decode()
    rows = dict(line.partition("=")[::2] for line in out.splitlines())
    if rows.get("ActiveState") != "active":
        return None
    return time.monotonic() - int(rows["ActiveEnterTimestampMonotonic"]) / 1e6


def main(wanted: Dict[str, Any]) -> int:
    completion = importlib.import_module("completion")  # beside this file
    up = uptime(wanted["unit"])
    if up is None:
        print("%s is not active; systemd sees to that" % wanted["unit"])
        return 0
    path = pathlib.Path(wanted["state"])
    try:
        memory = json.loads(path.read_text())
    except (OSError, ValueError):
        memory = {}
    before = tokens(completion.metrics(wanted["completion"]))
    answer = completion.answer(wanted["completion"])
    verdict, why = judge(answer, before, tokens(completion.metrics(wanted["completion"])))
    failures = memory.get("failures", 0) + 1
    memory, action = decide(memory, verdict, time.time(), up, wanted)
    path.write_text(json.dumps(dict(memory, verdict=verdict, why=why, action=action)))
    count = ", failure %d in a row, %d restart" % (failures, wanted["failures"])
    print("%s: %s" % (verdict, why) + (count if verdict == "wedged" else ""))
    if action == "give up":
        print(
            "%d restarts within an hour did not help; not trying again before one has passed"
            % len(memory["restarts"])
        )
        return 1
    if action in ("restart", "restart group"):
        unit = wanted["unit"] if action == "restart" else wanted["group_unit"]
        print("restarting %s" % unit)
        # It is wedged: its running requests would not finish, however long it waits for them.
        subprocess.run(["docker", "kill", wanted["container"]], stdout=subprocess.DEVNULL)
        return subprocess.run(["systemctl", "restart", "--no-block", unit]).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[2])))
