"""What a transfer costs, beside rsync and the limits: tests/benchmarks/relay.py.

Prints Markdown tables; everything is measured in one run, with the same files. Needs rsync, sshd
and iperf3 (Debian: apt-get install rsync openssh-server iperf3), and 25 GiB in --folder, which are
removed at the end. --scale 16 makes everything 16 times smaller. --lab: over the fabric of the
lab's hosts, which have to be up, instead of loopback; disks and programs are this machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from cluster.encryption import certificate  # noqa: E402
from tests.lab import existing  # noqa: E402
from tests.lab import hosts as plan  # noqa: E402
from tests.lab.images import NAME  # noqa: E402
from tests.started import HEAD, MIB, end, free_port, start  # noqa: E402

GIB = 1 << 30
CIPHER = "aes128-gcm@openssh.com"
"""The fastest that ssh has on processors with AES instructions."""


@dataclass(frozen=True)
class Side:
    """A host as the network sees it."""

    address: str
    prefix: tuple[str, ...] = ()
    """The words before a command that run it there."""


@dataclass(frozen=True)
class Network:
    """Where from and where to."""

    head: Side
    worker: Side


LOOPBACK = Network(Side(HEAD), Side("127.0.0.2"))


def lab_network() -> Network:
    """The fabric between the lab's hosts: their network namespaces alone."""
    lab = existing()
    if lab is None:
        raise SystemExit("the lab is down, bring it up: make demo")
    sides = []
    for host in plan.hosts(2):
        pid = lab.engine.text("inspect", "-f", "{{.State.Pid}}", f"{NAME}-{host.name}").strip()
        sides.append(Side(host.fabric, ("nsenter", "--net", "--target", pid)))
    return Network(*sides)


@dataclass
class Numbers:
    """What one way of copying took, run by run."""

    size: int
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.size / statistics.median(self.seconds) / 1e9

    @property
    def cpu_per_gib(self) -> float:
        """CPU seconds of all processes, on both sides."""
        return statistics.median(self.cpu) / (self.size / GIB)


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def call(*argv: object, **keys: Any) -> str:
    """Run a command; stops the benchmark if it fails."""
    words = [str(word) for word in argv]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **keys)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


@contextmanager
def server(side: Side, port: int, *argv: object) -> Iterator[None]:
    """A server in the foreground, until the end of the block; its CPU counts as a child's."""
    words = [*side.prefix, *(str(word) for word in argv)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    knock: list[str] = [*side.prefix, "bash", "-c", f"true < /dev/tcp/{side.address}/{port}"]
    try:
        for _ in range(100):
            if subprocess.run(knock, stderr=subprocess.DEVNULL, check=False).returncode == 0:
                break
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


class Files:
    """Files of random bytes; no two blocks are alike."""

    def __init__(self, folder: Path, count: int, size: int) -> None:
        self.folder, self.count = folder, count
        self.bytes = count * size
        block = bytearray(secrets.token_bytes(16 * MIB))
        for number in range(count):
            path = folder / f"{number % 50:02d}" / f"{number:05d}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for start in range(0, size, len(block)):
                    block[:16] = secrets.token_bytes(16)
                    file.write(block[: size - start])
        call("sync", "-f", folder)

    def paths(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    ended = end(process, seconds=3600)
    if ended.code:
        raise SystemExit(f"a role of relay failed:\n{ended.out}{ended.err}")
    return ended.result


def manifest(source: Path) -> dict[str, Any]:
    return result(start("relay", {"role": "manifest", "root": str(source)}))


def relay(
    source: Path,
    targets: list[Path],
    network: Network = LOOPBACK,
    encrypt: bool = False,
    **keys: Any,
) -> list[dict[str, Any]]:
    """One transfer; results of the sender and of every receiver. All receivers are one worker."""
    known, ports = {"token": secrets.token_hex(16)}, [free_port()]
    if encrypt:
        known["certificate"] = certificate().get_secret_value()
    receivers = [
        {"name": f"spark-{n}", "address": network.worker.address}
        for n in range(2, len(targets) + 2)
    ]
    digest = manifest(source)["digest"]
    both = {"address": network.head.address, "ports": ports, **keys}
    sender = {
        **{"role": "send", "root": str(source), "digest": digest, "receivers": receivers, **both}
    }
    running = [start("relay", sender, known, prefix=network.head.prefix)]
    for index, (own, target) in enumerate(zip(receivers, targets, strict=True)):
        wanted = {"role": "receive", "root": str(target), "sender": "spark-1", "index": index}
        wanted |= {"name": own["name"], "source": own["address"], **both}
        running.append(start("relay", wanted, known, prefix=network.worker.prefix))
    return [result(each) for each in running]


def rsync_ssh(source: Path, target: Path, keys: Path, network: Network) -> None:
    port, worker = free_port(), network.worker
    (keys / "sshd_config").write_text(
        f"Port {port}\nListenAddress {worker.address}\nHostKey {keys}/host\nPidFile none\n"
        f"AuthorizedKeysFile {keys}/own.pub\nStrictModes no\nUsePAM no\n"
    )
    ssh = (
        f"ssh -F none -p {port} -i {keys}/own -c {CIPHER} -o StrictHostKeyChecking=no "
        f"-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    )
    sshd = shutil.which("sshd") or "/usr/sbin/sshd"
    Path("/run/sshd").mkdir(exist_ok=True)  # Debian's own start of sshd makes it
    rsync = (*network.head.prefix, "rsync", "-a", "--whole-file", "-e", ssh)
    with server(worker, port, sshd, "-D", "-f", keys / "sshd_config"):
        call(*rsync, f"{source}/", f"{worker.address}:{target}/")


def rsync_daemon(source: Path, target: Path, keys: Path, network: Network) -> None:
    port, target_root, address = free_port(), target.parent, network.worker.address
    config = keys / "rsyncd.conf"
    config.write_text(
        f"use chroot = no\nuid = {os.getuid()}\ngid = {os.getgid()}\n[all]\npath = {target_root}\n"
        "read only = no\n"
    )
    daemon = ("--daemon", "--no-detach", f"--address={address}", f"--port={port}")
    with server(network.worker, port, "rsync", *daemon, f"--config={config}"):
        place = f"rsync://{address}:{port}/all/{target.name}/"
        call(*network.head.prefix, "rsync", "-a", "--whole-file", f"{source}/", place)


def cat(source: Path, target: Path | None, sync: bool = False) -> None:
    """Read every file, into new ones if there is a target."""
    files = sorted(path for path in source.rglob("*") if path.is_file())
    if target is None:
        with Path("/dev/null").open("wb") as sink:
            call_cat(files, sink)
        return
    target.mkdir()
    with (target / "all").open("wb") as sink:
        call_cat(files, sink)
        if sync:
            os.fsync(sink.fileno())


def call_cat(files: list[Path], sink: Any) -> None:
    subprocess.run(["cat", *map(str, files)], stdout=sink, check=True)


def iperf(network: Network, seconds: int, streams: int) -> float:
    """GB/s from the head to the worker."""
    port, address = free_port(), network.worker.address
    argv = ("-c", address, "-p", port, "-t", seconds, "-P", streams, "-J")
    with server(network.worker, port, "iperf3", "-s", "-B", address, "-p", port):
        for _ in range(10):  # it is busy for a moment with the connection that asked if it is there
            words = [*network.head.prefix, "iperf3", *map(str, argv)]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            found = json.loads(done.stdout or "{}").get("end", {}).get("sum_received")
            if found:
                return float(found["bits_per_second"]) / 8e9
            time.sleep(0.5)
    raise SystemExit(f"iperf3 failed:\n{done.stdout}{done.stderr}")


class Bench:
    """Runs ways of copying in turn, and keeps what they took."""

    def __init__(self, folder: Path, runs: int, network: Network) -> None:
        self.folder, self.runs, self.network = folder, runs, network
        self.keys = folder / "keys"
        self.keys.mkdir()
        for name in ("host", "own"):
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.keys / name)
        self.target = folder / "target"
        self.peak: dict[str, int] = {"send": 0, "receive": 0}

    def ours(self, source: Path, **keys: Any) -> None:
        sender, receiver = relay(source, [self.target], self.network, **keys)
        self.peak["send"] = max(self.peak["send"], sender["peak_bytes"])
        self.peak["receive"] = max(self.peak["receive"], receiver["peak_bytes"])

    def compare(self, files: Files) -> dict[str, Numbers]:
        """Every way, one after the other, so many times."""
        source = files.folder
        ways: dict[str, Callable[[], None]] = {
            "ours": lambda: self.ours(source),
            "ours, encrypted": lambda: self.ours(source, encrypt=True),
            "rsync over ssh": lambda: rsync_ssh(source, self.target, self.keys, self.network),
            "rsync daemon": lambda: rsync_daemon(source, self.target, self.keys, self.network),
            "cp -a, without a flush": lambda: call("cp", "-a", source, self.target) and None,
            "cat to /dev/null": lambda: cat(source, None),
            "cat to a new file": lambda: cat(source, self.target),
            "cat to a new file, fsync": lambda: cat(source, self.target, sync=True),
        }
        found = {name: Numbers(files.bytes) for name in ways}
        found["manifest from nothing"] = Numbers(files.bytes)
        for _ in range(self.runs):
            self.first_manifest(source, found["manifest from nothing"])
            for name, way in ways.items():
                self.timed(way, found[name])
        return found

    def first_manifest(self, source: Path, numbers: Numbers) -> None:
        Path(f"{source}.manifest.json").unlink(missing_ok=True)
        self.timed(lambda: manifest(source) and None, numbers)

    def timed(self, way: Callable[[], object], numbers: Numbers) -> None:
        self.warm(min(numbers.size, 4 * GIB))
        cpu, began = children_cpu(), time.monotonic()
        way()
        numbers.seconds.append(time.monotonic() - began)
        numbers.cpu.append(children_cpu() - cpu)
        if numbers.size > GIB // 4:
            shutil.rmtree(self.target, ignore_errors=True)
        else:
            # ext4 searches long for a free inode among many that were deleted a moment ago, so
            # small files stay until the end.
            self.target = self.target.with_name(f"target-{time.monotonic_ns()}")
        call("sync", "-f", self.folder)

    def warm(self, size: int) -> None:
        """Use and free as much memory as a copy needs, so that every way finds the same.

        A virtual machine gives memory that was free for seconds back to its host; to get it again
        costs several times what a copy does.
        """
        scratch = self.folder / "scratch"
        block = bytes(16 * MIB)
        with scratch.open("wb") as file:
            for _ in range(0, size, len(block)):
                file.write(block)
        scratch.unlink()

    def eight(self, files: Files) -> dict[str, Any]:
        """What eight receivers cost the sender's disk, from a cold cache."""
        manifest(files.folder)
        result(start("relay", {"role": "drop", "root": str(files.folder)}))
        targets = [self.folder / "targets" / str(n) for n in range(8)]
        began = time.monotonic()
        sender, *receivers = relay(files.folder, targets, self.network, drop_cache=True)
        shutil.rmtree(self.folder / "targets")
        return {
            "read": sender["read"] / files.bytes,
            "sent": sender["sent"] / files.bytes,
            "seconds": time.monotonic() - began,
            "peak": max(each["peak_bytes"] for each in (sender, *receivers)),
        }

    def nothing(self, files: Files) -> tuple[int, float]:
        """(bytes sent, seconds) of a transfer of what is there already."""
        relay(files.folder, [self.target], self.network)
        began = time.monotonic()
        sender, _ = relay(files.folder, [self.target], self.network)
        seconds = time.monotonic() - began
        shutil.rmtree(self.target)
        return sender["sent"], seconds


def show(label: str, found: dict[str, Numbers], link: float) -> None:
    """Print one set of files."""
    ssh, ours = found["rsync over ssh"], found["ours"]
    print(f"\n| {label} | GB/s | CPU s per GiB | of rsync over ssh |\n|---|---|---|---|")
    for name, numbers in found.items():
        times = f"{numbers.rate / ssh.rate:.1f}"
        print(f"| {name} | {numbers.rate:.2f} | {numbers.cpu_per_gib:.2f} | {times} |")
    for disk in ("cat to a new file", "cat to a new file, fsync"):
        limit = min(link, found["cat to /dev/null"].rate, found[disk].rate)
        print(f"| ours / lower limit ({disk}) | {ours.rate / limit:.2f} | | |")
    print(flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--scale", type=int, default=1, help="divide sizes and counts by this")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=["one", "shards", "small", "eight"])
    parser.add_argument("--lab", action="store_true", help="over the lab's fabric")
    options = parser.parse_args()
    network = lab_network() if options.lab else LOOPBACK
    scale = options.scale
    sets = {
        "one": ("one file of 4 GiB", 1, 4 * GIB // scale),
        "shards": ("40 shards of 256 MiB", 40, 256 * MIB // scale),
        "small": ("5,000 files of 8 KiB", 5000 // scale, 8 << 10),
    }
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder))
        folder = Path(name)
        bench = Bench(folder, options.runs, network)
        cores = len(os.sched_getaffinity(0))
        print(f"{cores} cores, Python {platform.python_version()}, medians of {options.runs}\n")
        link = statistics.median(iperf(network, 3, 4) for _ in range(options.runs))
        print(f"iperf3, 4 streams: {link:.2f} GB/s")
        for key, (label, count, size) in sets.items():
            if key not in options.only:
                continue
            files = Files(folder / key, count, size)
            show(label, bench.compare(files), link)
            if key == "small":
                sent, seconds = bench.nothing(files)
                print(f"nothing to do, 5,000 files: {sent} bytes sent, {seconds:.2f} s\n")
            shutil.rmtree(files.folder)
        if "eight" in options.only:
            eight = bench.eight(Files(folder / "eight", 4, 256 * MIB // scale))
            print(
                "8 receivers, cold cache: the sender's disk read {read:.2f} of the files, "
                "{sent:.2f} of them were sent, {seconds:.1f} s".format(**eight)
            )
            bench.peak["receive"] = max(bench.peak["receive"], eight["peak"])
        peaks = {key: value / MIB for key, value in bench.peak.items()}
        print("peak memory: sender {send:.0f} MiB, receiver {receive:.0f} MiB".format(**peaks))


if __name__ == "__main__":
    main()
