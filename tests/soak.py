"""Breaks the lab's cluster again and again, and looks for what piles up: python -m tests.soak

Fifty random faults from a fixed seed, one after another. Each has to heal; at the end nothing may
have grown: containers, volumes, processes, open files of the daemons, memory of Docker and systemd.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.faults import FAULTS, recover
from tests.lab import Lab, existing, up
from tests.test_lab import completions, deploy, variant
from tests.test_lab_faults import PATIENT, QUICK

SLOW = ("both lose power", "the fabric is cut for long")
"""A minute and more of waiting each; `make test-all` has them."""
COUNTS = {
    "containers": "docker ps -aq | wc -l",
    "volumes": "docker volume ls -q | wc -l",
    "processes": "ps -e --no-headers | wc -l",
    "open files of dockerd": "ls /proc/$(pgrep -x dockerd)/fd | wc -l",
    "open files of containerd": "ls /proc/$(pgrep -x containerd)/fd | wc -l",
    "open files of systemd": "ls /proc/1/fd | wc -l",
    "mounts": "wc -l < /proc/mounts",
    "shared memory segments": "ls /dev/shm | wc -l",
    "MiB of dockerd": "awk '/VmRSS/ {print int($2/1024)}' /proc/$(pgrep -x dockerd)/status",
}
MARGIN = {"processes": 15, "open files of dockerd": 10, "open files of containerd": 10}
"""More than before is no leak up to here: threads' helpers, journal followers. Others: none."""
MARGIN_MIB = 60


def counts(lab: Lab) -> dict[str, int]:
    """What may pile up, by host and kind."""
    return {
        f"{host}: {what}": int(lab.exec(host, "sh", "-c", command).strip())
        for host in lab.hosts
        for what, command in COUNTS.items()
    }


def grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """What has grown beyond its margin."""
    found = []
    for key, count in after.items():
        what = key.partition(": ")[2]
        margin = MARGIN_MIB if what.startswith("MiB") else MARGIN.get(what, 3)
        if count > before[key] + margin:
            found.append(f"{key}: {before[key]} before, {count} after")
    return found


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    names = [name for name in FAULTS if name not in SLOW]
    lab = existing() or up()
    with tempfile.TemporaryDirectory() as folder:
        deploy(variant(Path(folder), watchdog=QUICK, restarts=PATIENT))
    began = time.monotonic()
    # The first faults fill caches; what grows after them is a leak.
    warm_up = min(5, options.faults // 2)
    before: dict[str, int] = {}
    seconds = []
    for number in range(1, options.faults + 1):
        name = chance.choice(names)
        print(f"{number} of {options.faults}: {name}", flush=True)
        recovery = recover(lab, FAULTS[name])
        seconds.append(recovery)
        if number == warm_up:
            before = counts(lab)
    after = counts(lab)
    problems = grown(before, after)
    ours = sorted(each.restart for each in seconds)
    print(f"{options.faults} faults healed in {(time.monotonic() - began) / 60:.0f} minutes")
    print(f"our own share, seconds: median {ours[len(ours) // 2]:.1f}, at most {ours[-1]:.1f}")
    for key in after:
        print(f"  {key}: {before[key]} -> {after[key]}")
    print("\n".join(problems) or "nothing has grown")
    return 1 if problems or not completions() else 0


if __name__ == "__main__":
    sys.exit(main())
