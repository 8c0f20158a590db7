"""Two nodes on one machine: namespaces of their own, a fabric between them, a second network each.

Standard library, `ip`, `unshare` and `nsenter` only; needs root. What would be a container is a
process in the node's namespaces: one node is one Ray container and its sibling, which share the
process table, /dev/shm and /tmp.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from . import GpuTestError
from .container import Container

MANAGEMENT = "enP7s7"
"""The interface with the default route; made first, so its index is below the fabric's."""
FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
NOT_OF_AN_IMAGE = re.compile(r"(NCCL|GLOO|TP|VLLM|RAY|MASTER|PYTHON|HF|CUDA_VISIBLE)(_|$)")
"""What decides the outcome comes from the env files alone, except:"""
KEPT = "NCCL_NVLS_ENABLE"
"""how this machine's GPUs may be used."""
HOLDER = """
set -e
hostname "$1"
mount -t tmpfs -o "size=$2" tmpfs /dev/shm
shift 2
while [ $# -gt 0 ]; do
  mount --bind "$1" "$2"
  shift 2
done
echo ready
exec sleep infinity
"""


class Ip:
    """The program `ip`, this machine's or the one that was packed."""

    def __init__(self, packed: Path) -> None:
        found = shutil.which("ip")
        self.program = found or str(packed / "bin/ip")
        self.env = dict(os.environ)
        if found is None:
            if not (packed / "bin/ip").exists():
                raise GpuTestError("`ip` is not on this machine, and not packed: see `pack`")
            self.env["LD_LIBRARY_PATH"] = str(packed / "lib")

    def __call__(self, *words: str) -> None:
        """Run one command. Raises GpuTestError with what it said."""
        argv = [self.program, *words]
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise GpuTestError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Node:
    """One node. `address` is ADDRESS/PREFIX on the fabric; `gpu` an index on this machine."""

    def __init__(self, name: str, index: int, address: str, gpu: int, folder: Path) -> None:
        self.name, self.index, self.address, self.gpu = name, index, address, gpu
        self.folder = folder / name
        self.holder: subprocess.Popen[str] | None = None
        self.pid = 0

    @property
    def gateway(self) -> str:
        """The management network's router, which is this machine."""
        return f"10.{99 - self.index}.0.1"

    @property
    def management(self) -> str:
        """This node's address there."""
        return f"10.{99 - self.index}.0.2"

    def host_path(self, path: str) -> Path:
        """Where a path of this node's host lies: models belong to the machine, all else to it."""
        if path.startswith("/srv/models/"):
            return Path(path)
        return self.folder / "host" / path.lstrip("/")

    def start(self, ip: Ip, files: Mapping[str, str], containers: Sequence[Container]) -> None:
        """Boot: write the files, mount what the containers share, become process 1."""
        for path, content in files.items():
            self.host_path(path).parent.mkdir(parents=True, exist_ok=True)
            self.host_path(path).write_text(content)
        mounts: dict[str, Path] = {"/tmp": self._folder("volumes/tmp")}
        for source, target in [pair for each in containers for pair in each.volumes]:
            if target == "/tmp":
                continue
            place = self.host_path(source)
            if not place.exists():
                place.mkdir(parents=True)  # as Docker does
            if place.is_file():  # in a folder of its own: this machine's stays as it is
                folder = self._folder(f"volumes{Path(target).parent}")
                shutil.copy(place, folder / Path(target).name)
                place, target = folder, str(Path(target).parent)
            Path(target).mkdir(parents=True, exist_ok=True)
            mounts[target] = place
        shm = next((each.shm_size for each in containers if each.shm_size), "64m")
        argv = [ip.program, "netns", "exec", self.name, "unshare", "--uts", "--ipc", "--pid"]
        argv += ["--mount", "--fork", "--mount-proc", "--propagation=private"]
        argv += ["sh", "-c", HOLDER, "sh", self.name, shm]
        # /tmp last: a source may lie below this machine's.
        for target, place in sorted(mounts.items(), key=lambda pair: pair[0] == "/tmp"):
            argv += [str(place), target]
        complaints = self._folder("host") / "complaints"
        with complaints.open("w") as errors:
            self.holder = subprocess.Popen(
                argv,
                env=ip.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.holder.stdout is not None
        if self.holder.stdout.readline().strip() != "ready":
            self.holder.wait(10)
            self.holder = None
            raise GpuTestError(f"node {self.name} did not start: {complaints.read_text().strip()}")
        task = f"/proc/{self.holder.pid}/task/{self.holder.pid}/children"
        self.pid = int(Path(task).read_text().split()[0])

    def stop(self) -> None:
        """End every process of the node at once: the kernel does, after its process 1."""
        if self.holder is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.holder.wait(30)
        self.holder, self.pid = None, 0
        shutil.rmtree(self.folder / "volumes", ignore_errors=True)

    def spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        output: IO[Any] | int = subprocess.PIPE,
        errors: IO[Any] | int = subprocess.STDOUT,
    ) -> subprocess.Popen[bytes]:
        """Start a process in the node, with these variables only; its stdin is a pipe."""
        enter = ["--net", "--uts", "--ipc", "--mount", "--pid"]
        program = shutil.which("nsenter") or "nsenter"
        return subprocess.Popen(
            [program, f"--target={self.pid}", *enter, "--", *argv],
            env=dict(env),
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
        )

    def environment(self, site: Sequence[Path], variables: Mapping[str, str]) -> dict[str, str]:
        """What an image would set, and then the env file's variables."""
        path = [*(f"{each}/bin" for each in site), str(Path(sys.executable).parent)]
        base = {
            name: value
            for name, value in os.environ.items()
            if name == KEPT or not NOT_OF_AN_IMAGE.match(name)
        }
        base |= {
            "PATH": ":".join([*path, os.environ.get("PATH", "/usr/bin:/bin")]),
            "PYTHONPATH": ":".join(map(str, site)),
            "PYTHONUNBUFFERED": "1",
            "HOME": "/root",
            "CUDA_VISIBLE_DEVICES": str(self.gpu),
        }
        return {**base, **variables}

    def _folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def raise_limits(ulimits: Mapping[str, int]) -> None:
    """Raise what docker run --ulimit raises, for all that is started after this."""
    for name, limit in ulimits.items():
        number = resource.RLIM_INFINITY if limit < 0 else limit
        which = getattr(resource, f"RLIMIT_{name.upper()}")
        # A container may forbid it; without RDMA, nothing here needs it.
        with contextlib.suppress(ValueError, PermissionError):
            resource.setrlimit(which, (number, number))


@contextlib.contextmanager
def network(ip: Ip, nodes: Sequence[Node], interface: str) -> Iterator[None]:
    """Make the nodes' networks; at the end, stop the nodes and remove all of it."""
    before = FORWARD.read_text()
    _remove(ip, nodes)  # what a run that was killed has left
    try:
        for node in nodes:
            folder = Path("/etc/netns") / node.name
            folder.mkdir(parents=True, exist_ok=True)
            # As Debian and Ubuntu write it; gloo listens there when nothing tells it otherwise.
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {node.name}\n")
            ip("netns", "add", node.name)
            ip("-n", node.name, "link", "set", "lo", "up")
        for node in nodes:
            outside = f"mgmt{node.index}"
            peer = ["peer", "name", MANAGEMENT, "netns", node.name]
            ip("link", "add", outside, "type", "veth", *peer)
            ip("addr", "add", f"{node.gateway}/24", "dev", outside)
            ip("link", "set", outside, "up")
        one, other = nodes
        peer = ["peer", "name", interface, "netns", other.name]
        ip("-n", one.name, "link", "add", interface, "type", "veth", *peer)
        for node in nodes:
            for name, address in ((MANAGEMENT, f"{node.management}/24"), (interface, node.address)):
                ip("-n", node.name, "addr", "add", address, "dev", name)
                ip("-n", node.name, "link", "set", name, "up")
            ip("-n", node.name, "route", "add", "default", "via", node.gateway)
        route(False)
        yield
    finally:
        for node in nodes:
            node.stop()
        _remove(ip, nodes)
        FORWARD.write_text(before)


def _remove(ip: Ip, nodes: Sequence[Node]) -> None:
    for node in nodes:
        for words in (("link", "del", f"mgmt{node.index}"), ("netns", "del", node.name)):
            with contextlib.suppress(GpuTestError):
                ip(*words)
        shutil.rmtree(Path("/etc/netns") / node.name, ignore_errors=True)


def route(between: bool) -> None:
    """Let this machine pass packets between the management networks, or drop them in silence."""
    FORWARD.write_text("1" if between else "0")


def gpus() -> list[str]:
    """What nvidia-smi lists, a line per GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return [line for line in said.splitlines() if line.startswith("GPU ")]
