"""Follows a unit while it starts: prints where it is, ends when it is ready, dead or too late.

Argument (JSON): unit, deadline (seconds), phases [{text, pattern}], ready (a pattern of the log),
matters, noise (patterns of the lines that say why something ended, and of those that do not),
port (or null: an address on this host that has to accept connections too).
Exit code 0: ready. 1: the process died; its last lines that matter follow. 2: the deadline.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from typing import Any, Dict, List

PROGRESS_SECONDS = 10
TAIL_LINES = 20
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Progress:
    """Turns log lines into the few lines a person wants to see."""

    def __init__(self, wanted: Dict[str, Any]) -> None:
        self.phases = [(re.compile(row["pattern"]), row["text"]) for row in wanted["phases"]]
        self.ready_pattern = re.compile(wanted["ready"])
        self.matters = re.compile(wanted["matters"], re.IGNORECASE)
        self.noise = re.compile(wanted["noise"])
        self.ready = False
        self.phase = ""
        self.detail = ""
        self.lines: List[str] = []

    def feed(self, line: str) -> str | None:
        """Take a log line; return a line to print, or None."""
        line = COLOUR.sub("", line).rstrip()
        self.lines.append(line)
        del self.lines[:-2000]
        if self.ready_pattern.search(line):
            self.ready = True
        for pattern, text in self.phases:
            match = pattern.search(line)
            if match:
                return self.enter(text, match.groupdict())
        return None

    def enter(self, text: str, found: Dict[str, Any]) -> str | None:
        """Come to a phase; return what there is to say about it, if anything."""
        shown = text.format_map(Blank(found))
        if shown == self.detail:
            return None
        first = text != self.phase
        self.phase, self.detail = text, shown
        complete = "n" in found and found["n"] == found.get("m")
        # Numbers that move quickly are for the next progress line.
        return shown if first or complete or "n" not in found else None

    def now(self) -> str:
        """Where the start-up is."""
        return self.detail or "starting"

    def tail(self) -> List[str]:
        """The last lines that matter, else the last lines."""
        lines = [line for line in self.lines if line]
        matter = [
            each for each in lines if self.matters.search(each) and not self.noise.search(each)
        ]
        chosen = (matter or lines)[-TAIL_LINES:]
        return [line[:400] for line in chosen]


class Blank(Dict[str, str]):
    """A ? for what the log line did not say."""

    def __missing__(self, key: str) -> str:
        return "?"


def show(unit: str) -> Dict[str, str]:
    names = "ActiveState,SubState,InvocationID,NRestarts,Result,ExecMainStatus"
    out = subprocess.run(
        ["systemctl", "show", "--property=" + names, unit], stdout=subprocess.PIPE
    ).stdout.decode(errors="replace")
    return dict(line.partition("=")[::2] for line in out.splitlines())


def accepts(port: List[Any] | None) -> bool:
    if port is None:
        return True
    try:
        socket.create_connection((port[0], port[1]), 1).close()
    except OSError:
        return False
    return True


def died(first: Dict[str, str], state: Dict[str, str]) -> str | None:
    """Return why the unit is not the one that we began to follow, or None."""
    if state["InvocationID"] != first["InvocationID"] or state["NRestarts"] != first["NRestarts"]:
        return "it ended and was started again by systemd"
    if state["ActiveState"] in ("failed", "inactive") or state["SubState"] == "auto-restart":
        return "it ended (%s, exit code %s)" % (state["Result"], state["ExecMainStatus"])
    return None


def say(began: float, text: str) -> None:
    print("%4d s  %s" % (time.monotonic() - began, text), flush=True)


class Journal:
    """The lines of one invocation of a unit, as they come."""

    def __init__(self, invocation: str) -> None:
        # -f starts with ten lines unless told otherwise.
        self.process = subprocess.Popen(
            ["journalctl", "-f", "-n", "all", "-o", "cat", "_SYSTEMD_INVOCATION_ID=" + invocation],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        self.stream = self.process.stdout
        os.set_blocking(self.stream.fileno(), False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.stream, selectors.EVENT_READ)
        self.rest = b""

    def lines(self, seconds: float) -> List[str]:
        """Wait for new lines, `seconds` at most."""
        if not self.selector.get_map():
            time.sleep(seconds)
            return []
        if not self.selector.select(seconds):
            return []
        data = self.stream.read()
        if data == b"":
            self.selector.unregister(self.stream)
        *lines, self.rest = (self.rest + (data or b"")).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> None:
        """Stop following."""
        self.process.kill()
        self.process.wait()


def begun(unit: str) -> Dict[str, str]:
    """Return the unit's state once systemd has begun to start it, or after ten seconds."""
    for _ in range(50):
        state = show(unit)
        if state.get("ActiveState") in ("activating", "active"):
            break
        time.sleep(0.2)
    return state


def main(wanted: Dict[str, Any]) -> int:
    began = spoken = time.monotonic()
    unit = wanted["unit"] + ".service"
    progress = Progress(wanted)
    first = begun(unit)
    journal = Journal(first.get("InvocationID", ""))
    try:
        while True:
            for line in journal.lines(1):
                news = progress.feed(line)
                if news:
                    say(began, news)
                    spoken = time.monotonic()
            if progress.ready and accepts(wanted["port"]):
                return 0
            now = time.monotonic()
            why = died(first, show(unit))
            if why:
                # The last lines may still be on their way through the journal.
                for line in journal.lines(1):
                    progress.feed(line)
                return end(1, "%s: %s" % (wanted["unit"], why), progress)
            if now - began > wanted["deadline"]:
                why = "%s: not ready after %d s; it is at: %s" % (
                    wanted["unit"],
                    wanted["deadline"],
                    progress.now(),
                )
                return end(2, why, progress)
            if now - spoken >= PROGRESS_SECONDS:
                say(began, "... " + progress.now())
                spoken = now
    finally:
        journal.close()


def end(code: int, why: str, progress: Progress) -> int:
    print("\n".join([why, *("  | " + line for line in progress.tail())]), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[2])))
