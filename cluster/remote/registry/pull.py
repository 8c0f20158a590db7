"""Docker's own pull from a port of ours, on every host."""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import select
import signal
import subprocess
import threading
import time
from typing import Any, Callable, Dict, List

from cluster.remote.registry.source import ImageError, Reference, docker, last_line
from cluster.remote.wire import PROGRESS_SECONDS, how_far, say

PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)


def stay() -> None:
    """Raise ImageError when nobody reads what we print: the deployment has been stopped."""
    poll = select.poll()
    poll.register(1, 0)
    if any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0)):
        raise ImageError("the deployment that started this has ended")


def wait_until(
    condition: Callable[[], bool], seconds: float, tick: Callable[[], None] = lambda: None
) -> bool:
    """Wait for a condition; whether it came."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        tick()
        time.sleep(0.05)
    return True


class Progress:
    """Reads what docker pull prints, and says how far it is, at most every PROGRESS_SECONDS."""

    def __init__(self, layers: Callable[[], Dict[str, int]], count: Callable[[], int]) -> None:
        self.layers, self.count = layers, count
        self.began = self.spoken = time.monotonic()
        self.here: set[str] = set()
        self.complete: set[str] = set()

    def hear(self, line: str) -> None:
        """Take a line like `0a1b2c3d4e5f: Pull complete`."""
        layer, _, what = line.partition(": ")
        if what.startswith("Already exists"):
            self.here.add(layer)
        elif what.startswith("Pull complete"):
            self.complete.add(layer)

    def tell(self) -> None:
        """Say it, if there is time again."""
        now, layers = time.monotonic(), self.layers()
        if now - self.spoken < PROGRESS_SECONDS or not layers:
            return
        self.spoken = now
        lacking = {name: size for name, size in layers.items() if name not in self.here}
        total, done = sum(lacking.values()), self.count()
        if done < total:
            say(how_far("image", done, total, now - self.began))
        else:
            unpacked = len(self.complete.intersection(lacking))
            say("image: all is here; Docker unpacks, %d of %d layers" % (unpacked, len(lacking)))


def pull(
    wanted: Dict[str, Any],
    port: int,
    layers: Callable[[], Dict[str, int]],
    count: Callable[[], int],
    trouble: Callable[[], Any],
) -> str:
    """Have Docker pull from our port, and give the image its name; return its id.

    layers, count: for progress. trouble: why it is to be given up, when it is. Raises ImageError.
    """
    repository = Reference.parse(wanted["image"]).repository
    name = "127.0.0.1:%d/%s@%s" % (port, repository, wanted["digest"])
    progress, complaint = Progress(layers, count), b""
    try:
        process = subprocess.Popen(
            ("docker", "pull", name),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )
    except FileNotFoundError:
        raise ImageError("there is no docker command on this host: install Docker") from None
    assert process.stdout is not None and process.stderr is not None
    out, err = process.stdout, process.stderr

    def listen() -> None:
        for line in out:
            progress.hear(line.decode(errors="replace").strip())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    complaints: List[bytes] = []
    other = threading.Thread(target=lambda: complaints.append(err.read()), daemon=True)
    other.start()
    try:
        while process.poll() is None:
            stay()
            reason = trouble()
            if reason:
                raise ImageError(str(reason))
            progress.tell()
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            process.terminate()  # the engine ends the pull when its client goes
            process.wait()
    other.join(5)
    complaint = b"".join(complaints)
    if process.returncode:
        # The reason may be on its way from the head: Docker heard it first.
        wait_until(lambda: bool(trouble()), 1)
        raise ImageError(str(trouble() or explained(complaint)))
    try:
        docker("tag", name, wanted["tag"])
        image = json.loads(docker("image", "inspect", "--format", "{{json .}}", wanted["tag"]))
    finally:
        with contextlib.suppress(ImageError):
            docker("rmi", name)
    forget_leftovers(image, wanted, repository)
    return str(image["Id"])


def forget_leftovers(image: Dict[str, Any], wanted: Dict[str, Any], repository: str) -> None:
    """Remove temporary names that killed runs have left on the image."""
    real = [Reference.parse(wanted[key]).host for key in ("image", "tag")]
    for name in image.get("RepoDigests") or []:
        is_ours = re.match(r"127\.0\.0\.1:\d+/" + re.escape(repository) + "@", name)
        if is_ours and Reference.parse(name).host not in real:
            with contextlib.suppress(ImageError):
                docker("rmi", name)


def explained(complaint: bytes) -> str:
    """What docker pull's complaint means, and what to do."""
    text = last_line(complaint)
    if "no space left on device" in text:
        return (
            "the disk of this host's Docker became full (%s): make room there; docker system df "
            "shows what uses it, and the next run goes on" % text
        )
    if "verification failed" in text or "unexpected commit digest" in text:
        return (
            "what arrived is not what was sent (%s): Docker refused it. A fault of the network, or "
            "of the memory of either host; run it again" % text
        )
    if "Cannot connect to the Docker daemon" in text or "permission denied" in text:
        return "Docker does not answer on this host: %s" % text
    if "no matching manifest" in text:
        return "the image is not made for this host's architecture: %s" % text
    return "docker pull failed: %s; run it again" % text
