"""The lab at the command line: python -m tests.lab build|up|down|status|exec."""

import argparse
import subprocess
import sys

from . import LabError, build, down, existing, summary, up
from .images import NAME


def main() -> int:
    """Run one command; 1 if it failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="make the images and the model")
    parse_up = commands.add_parser("up", help="bring the lab up, or up to date")
    parse_up.add_argument("--hosts", type=int, default=2, metavar="N")
    parse_down = commands.add_parser("down", help="remove the hosts; keep images as a cache")
    parse_down.add_argument("--purge", action="store_true", help="remove the cache as well")
    commands.add_parser("status", help="say whether the lab is up, and how to reach it")
    parse_exec = commands.add_parser("exec", help="run a command as root in a host")
    parse_exec.add_argument("host")
    parse_exec.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND")
    arguments = parser.parse_args()
    try:
        return _run(arguments)
    except LabError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "build":
        build()
    elif arguments.command == "up":
        print(summary(up(arguments.hosts)))
    elif arguments.command == "down":
        down(arguments.purge)
    else:
        lab = existing()
        if lab is None:
            raise LabError("the lab is not up: python -m tests.lab up")
        if arguments.command == "status":
            print(summary(lab))
        else:
            # Not lab.exec: a person wants a terminal, and no time limit.
            terminal = ["-it"] if sys.stdin.isatty() else ["-i"]
            argv = ["docker", "exec", *terminal, f"{NAME}-{arguments.host}", *arguments.argv]
            return subprocess.run(argv, env=lab.engine.environment(), check=False).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
