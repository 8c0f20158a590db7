"""What it costs to bring an image from the head to a worker: the relay, and what it replaced.

Needs two Docker engines of this machine and an image in a registry that the first can reach:

    .venv/bin/python -m tests.benchmarks.image unix:///HEAD.sock unix:///WORKER.sock IMAGE

The head's engine has to have the image. Everything goes over loopback, so that what is compared is
the work of the programs and engines, not a network. The worker's copy is removed before every run.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.started import end, free_port, start

HERTZ = os.sysconf("SC_CLK_TCK")


@dataclass
class Cost:
    """Of one way: seconds, and what was counted."""

    wall: float
    engines: float
    """CPU seconds of dockerd and containerd."""
    ours: float = 0
    wire: int = 0
    """Bytes over the fabric."""


@dataclass
class Bench:
    head: str
    worker: str
    image: str
    tag: str = "relay.invalid/benchmark:1"
    folder: str = ""
    results: list[dict[str, Any]] = field(default_factory=list)

    def docker(self, engine: str, *argv: str, check: bool = True) -> str:
        done = subprocess.run(["docker", "-H", engine, *argv], capture_output=True, text=True)
        if check and done.returncode:
            sys.exit(f"docker {' '.join(argv)}: {done.stderr}")
        return done.stdout.strip()

    def start(self, engine: str, token: str, **wanted: Any) -> subprocess.Popen[str]:
        argument = {"image": self.image, "cache": f"{self.folder}/cache", **wanted}
        return start("registry", argument, {"token": token}, {**os.environ, "DOCKER_HOST": engine})

    def result(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        ended = end(process, seconds=3600)
        if ended.code:
            sys.exit(ended.out + ended.err)
        self.results.append(ended.result)
        return ended.result

    def relay(self, **source: Any) -> tuple[float, int]:
        """Run both sides; (our CPU seconds, bytes over the wire)."""
        token = secrets.token_hex(16)
        found = self.result(self.start(self.head, token, role="resolve", **source))
        ports = [free_port()]
        shared = {"digest": found["digest"], "address": "127.0.0.1", "ports": ports, **source}
        receiver = {"name": "worker", "address": "127.0.0.2"}
        head = self.start(self.head, token, role="serve", tag=None, receivers=[receiver], **shared)
        own = {"name": "worker", "index": 0, "source": "127.0.0.2", "sender": "head"}
        worker = self.start(self.worker, token, role="receive", tag=self.tag, **own, **shared)
        received, served = self.result(worker), self.result(head)
        cpu = sum(each["cpu_seconds"] for each in (found, received, served))
        return cpu, received["received"]

    def saved(self) -> tuple[float, int]:
        save = subprocess.Popen(
            ["docker", "-H", self.head, "save", self.image], stdout=subprocess.PIPE
        )
        subprocess.run(
            ["docker", "-H", self.worker, "load", "-q"], stdin=save.stdout, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        save.wait()
        return 0, int(self.docker(self.head, "image", "inspect", "-f", "{{.Size}}", self.image))

    def direct(self) -> tuple[float, int]:
        self.docker(self.worker, "pull", "-q", self.image)
        return 0, 0

    def forget(self) -> None:
        """Remove the image from the worker, under all its names."""
        identity = self.docker(self.head, "image", "inspect", "-f", "{{.Id}}", self.image)
        self.docker(self.worker, "rmi", "-f", identity, check=False)

    def measure(self, way: Callable[[], tuple[float, int]], forget: bool = True) -> Cost:
        if forget:
            self.forget()
        before, began = engine_seconds(), time.monotonic()
        ours, wire = way()
        return Cost(time.monotonic() - began, engine_seconds() - before, ours, wire)


def engine_seconds() -> float:
    """CPU seconds so far of every dockerd and containerd that this user can see."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if name in ("dockerd", "containerd", "unpigz", "docker-untar", "exe"):
            # With its children that have ended: dockerd unpacks in processes of its own.
            total += sum(map(int, rest.split()[11:15]))
    return total / HERTZ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("head", "worker", "image"):
        parser.add_argument(name)
    parser.add_argument("--runs", type=int, default=3)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(wanted.head, wanted.worker, wanted.image, folder=folder)
        archive = f"{folder}/image.tar"
        bench.docker(bench.head, "save", "-o", archive, bench.image)
        ways: dict[str, tuple[Callable[[], tuple[float, int]], bool]] = {
            "docker pull, straight from the registry (not possible on the fabric)": (
                bench.direct,
                True,
            ),
            "relay from the registry": (bench.relay, True),
            "relay, nothing to do": (bench.relay, False),
            "relay of an archive": (lambda: bench.relay(archive=archive), True),
            "relay of the head's own image": (lambda: bench.relay(local=True), True),
            "`docker save` into `docker load`": (bench.saved, True),
        }
        print("| what | wall, s | engines' CPU, s | our CPU, s | MB over the wire |")
        print("|---|---|---|---|---|")
        for name, (way, forget) in ways.items():
            costs = [bench.measure(way, forget) for _ in range(wanted.runs)]
            cost = sorted(costs, key=lambda each: each.wall)[len(costs) // 2]
            print(
                f"| {name} | {cost.wall:.1f} | {cost.engines:.1f} | {cost.ours:.1f} "
                f"| {cost.wire / 1e6:.1f} |",
                flush=True,
            )
        peak = max(each["peak_bytes"] for each in bench.results)
        print(f"\npeak memory of a program of ours: {peak / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
