"""Waits before a container starts again that has ended soon after its start: longer each time.

Argument (JSON): unit, state (path of a JSON file that is gone after a reboot), delay
(seconds that systemd itself waits before a restart), max_delay, reset_after (seconds).

systemd's RestartSteps= does this since 254, but never forgets: a unit that has ended four times in
a year waits longest at each end from then on (systemd/systemd#43813).
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import time
from typing import Any, Dict, Tuple


def decide(
    memory: Dict[str, Any], is_restart: bool, now: float, wanted: Dict[str, Any]
) -> Tuple[int, float]:
    """Return (restarts in a row that came soon, seconds to wait beyond systemd's own delay).

    memory: {} or began (seconds, monotonic), steps
    """
    ran = now - memory["began"] if memory else now
    if not is_restart or ran >= wanted["reset_after"]:
        return 0, 0
    steps = memory["steps"] + 1
    wait = min(wanted["max_delay"], wanted["delay"] * 2 ** (steps - 1))
    return steps, max(0, wait - wanted["delay"])


def restarts(unit: str) -> int:
    """How often systemd itself has restarted a unit since somebody started it."""
    out = subprocess.run(
        ["systemctl", "show", "--property=NRestarts", unit], stdout=subprocess.PIPE
    ).stdout.decode()
    return int(out.strip().partition("=")[2] or 0)


def main(wanted: Dict[str, Any]) -> int:
    path = pathlib.Path(wanted["state"])
    try:
        memory = json.loads(path.read_text())
    except (OSError, ValueError):
        memory = {}
    steps, wait = decide(memory, restarts(wanted["unit"]) > 0, time.monotonic(), wanted)
    if wait:
        print("it ended soon after its start, %d in a row: waiting %d s more" % (steps, wait))
        sys.stdout.flush()
        time.sleep(wait)
    path.write_text(json.dumps({"began": time.monotonic(), "steps": steps}))
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[2])))
