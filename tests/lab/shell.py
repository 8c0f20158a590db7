"""Run commands for the lab: every one bounded in time, every failure told in a few lines."""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

_STARTED = time.monotonic()


class LabError(Exception):
    """Something the person at the keyboard can act on: what, why, and what to do."""


def say(text: str) -> None:
    """Print one progress line with the seconds since this process started."""
    print(f"[{time.monotonic() - _STARTED:5.0f}s] {text}", file=sys.stderr, flush=True)


def run(
    argv: Sequence[str],
    *,
    timeout: float = 60,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[bytes]:
    """Run argv and capture its output; raise LabError on failure (if check) or after timeout s."""
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            env=env,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError:
        raise LabError(f"{argv[0]} is not installed, or not on PATH") from None
    except subprocess.TimeoutExpired as expired:
        tail = last_lines(expired.stdout, expired.stderr)
        raise LabError(f"no end after {timeout:.0f} s: {_short(argv)}{tail}") from None
    if check and done.returncode != 0:
        tail = last_lines(done.stdout, done.stderr)
        raise LabError(f"exit status {done.returncode}: {_short(argv)}{tail}")
    return done


def last_lines(*outputs: bytes | None, count: int = 12) -> str:
    """The last lines of a command's outputs, indented, to stand under an error message."""
    text = b"\n".join(output for output in outputs if output).decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return "".join(f"\n    {line}" for line in lines[-count:])


def _short(argv: Sequence[str]) -> str:
    text = " ".join(argv)
    return text if len(text) <= 160 else text[:157] + "..."
