"""Holds a lock on this host until stdin ends; that is when the ssh connection behind it ends.

So a deploy that is killed, or whose machine goes away, leaves no lock behind.
Argument (JSON): path, holder (who holds it, for others to read), take_over. Prints one JSON object:
{"held_by": null} once it has the lock, or {"held_by": {...}} where somebody else has it.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from typing import IO, Any, Dict


def take(file: IO[str], deadline: float) -> bool:
    end = time.monotonic() + deadline
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.1)


def holder(file: IO[str]) -> Dict[str, Any]:
    file.seek(0)
    try:
        return dict(json.load(file))
    except ValueError:
        return {}


def main(wanted: Dict[str, Any]) -> int:
    with open(wanted["path"], "a+") as file:
        has_it = take(file, 0)
        if not has_it and wanted["take_over"]:
            pid = holder(file).get("pid")
            if pid:
                os.kill(pid, signal.SIGTERM)
            has_it = take(file, 5)
        if not has_it:
            print(json.dumps({"held_by": holder(file)}))
            return 1
        file.truncate(0)
        file.write(json.dumps(dict(wanted["holder"], pid=os.getpid())))
        file.flush()
        print(json.dumps({"held_by": None}), flush=True)
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
