"""Role send: gives pieces of files to receivers that ask for them."""

from __future__ import annotations

import bisect
import contextlib
import errno
import itertools
import json
import os
import struct
import threading
import time
import zlib
from typing import Any, Dict, List

from cluster.remote.relay.manifest import (
    PIECE,
    Entry,
    Manifest,
    closing,
    drop,
    drop_tree,
    manifest_path,
    raw,
    text,
)
from cluster.remote.relay.protocol import AHEAD, BATCH, CHANGED, GOOD, SMALL, STREAMS
from cluster.remote.wire import (
    BUFFER,
    CONTROL,
    Door,
    Link,
    Progress,
    SilenceError,
    TransferError,
    listen,
    why,
)

WINDOW = 24
"""Pieces by which a receiver may be ahead of the slowest, which then finds them in the cache."""
LAG_SECONDS = 10
"""A receiver that gets nothing for that long is not waited for."""


class Pace:
    """Keeps receivers so near to each other that the disk is read once for all of them."""

    def __init__(self, count: int) -> None:
        self.changed = threading.Condition()
        self.at = dict.fromkeys(range(count), 0)
        self.moved = dict.fromkeys(range(count), time.monotonic())

    def low(self) -> int | None:
        """The position of the slowest that still moves; None when there is none."""
        alive = time.monotonic() - LAG_SECONDS
        with self.changed:
            return min((at for who, at in self.at.items() if self.moved[who] > alive), default=None)

    def reach(self, who: int, position: int) -> None:
        """Note where a receiver is, and wait for those that are far behind."""
        with self.changed:
            if position > self.at.get(who, position):
                self.at[who], self.moved[who] = position, time.monotonic()
                self.changed.notify_all()
            while True:
                low = self.low()
                if low is None or position <= low + WINDOW or who not in self.at:
                    return
                self.changed.wait(0.5)

    def leave(self, who: int) -> None:
        """Wait no longer for a receiver."""
        with self.changed:
            self.at.pop(who, None)
            self.changed.notify_all()


class Receiver:
    """What the sender knows of a receiver."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.state, self.reason = "absent", ""
        self.links: List[Link] = []
        self.total = self.done = 0


class Sender:
    """Role send. The main thread lets receivers in, one thread answers each connection."""

    def __init__(self, wanted: Dict[str, Any]) -> None:
        self.wanted, self.root = wanted, os.fsencode(wanted["root"])
        self.stall = wanted.get("stall", 20)
        manifest = Manifest.load(manifest_path(wanted))
        if manifest is None or manifest.digest != wanted["digest"]:
            raise TransferError(
                "%s is not the manifest that this transfer was planned with: run it again"
                % manifest_path(wanted)
            )
        self.manifest = manifest
        sizes = (entry.pieces for entry in manifest.files)
        self.first = [0, *itertools.accumulate(sizes)]
        """Of every file, how many pieces come before it."""
        self.receivers = [Receiver(**each) for each in wanted["receivers"]]
        self.pace = Pace(len(self.receivers))
        self.sent, self.dropped, self.lock = 0, 0, threading.Lock()
        self.faults: List[str] = []
        """What is wrong here, not at a receiver."""

    def run(self) -> Dict[str, Any]:
        """Send; raises TransferError where it cannot begin. Failures of receivers are a result."""
        began = time.monotonic()
        for entry in self.manifest.files:
            try:
                same = entry.is_same(os.stat(self.full(entry)))
            except OSError:
                same = False
            if not same:
                raise TransferError(self.has_changed(entry))
        listener = listen(self.wanted["address"], self.wanted["ports"])
        door = Door(listener, [each.address for each in self.receivers])
        progress = Progress("sending", 0)
        try:
            while not self.is_over(time.monotonic() - began):
                for link, index, stream in door.admit(0.1):
                    self.take_in(link, index, stream)
                progress.total = sum(each.total for each in self.receivers)
                progress.done = sum(each.done for each in self.receivers)
                if progress.total:
                    progress.tell()
                if self.wanted.get("drop_cache"):
                    self.drop_what_all_have()
        finally:
            door.close()
        if self.wanted.get("drop_cache"):
            drop_tree(self.wanted)
        return self.result(time.monotonic() - began)

    def is_over(self, seconds: float) -> bool:
        """Whether every receiver is through, one way or the other."""
        for index, receiver in enumerate(self.receivers):
            if receiver.state == "absent" and seconds > self.wanted.get("patience", 60):
                receiver.reason = "did not come within %d s" % self.wanted.get("patience", 60)
                self.pace.leave(index)
            elif receiver.state in ("absent", "here"):
                return False
        return True

    def take_in(self, link: Link, index: int, stream: int) -> None:
        """Start a thread for a connection of a receiver."""
        receiver = self.receivers[index]
        if stream == CONTROL and receiver.state == "absent":
            receiver.state, receiver.reason, work = "here", "", self.converse
        elif stream < STREAMS and receiver.state == "here":
            work = self.serve
        else:
            return link.peer.close()
        receiver.links.append(link)
        threading.Thread(target=work, args=(link, index), daemon=True).start()
        return None

    def converse(self, link: Link, index: int) -> None:
        """Give the manifest, then answer every sign of life until the receiver is through."""
        receiver = self.receivers[index]
        try:
            link.encrypt(is_sender=True)
            link.limit(self.stall)
            body = zlib.compress(self.manifest.wire(), 1)
            link.write_frame(link.sign(b"manifest" + body) + body)
            while receiver.state == "here":
                news = json.loads(link.read_frame())
                receiver.total, receiver.done = news["total"], news["done"]
                if news["over"]:
                    receiver.reason = news["error"] or ""
                    receiver.state = "failed" if news["error"] else "done"
                link.write_frame(b"")
        except (SilenceError, ValueError, KeyError):
            receiver.reason = "no sign of life for %d s" % self.stall
        except (OSError, EOFError):
            receiver.reason = "it ended the connection: its program was stopped or died"
        if receiver.state == "here":
            receiver.state = "failed"
        self.pace.leave(index)
        for each in receiver.links:
            each.cut()

    def serve(self, link: Link, index: int) -> None:
        """Answer requests for pieces."""
        files = Files(self)
        try:
            link.encrypt(is_sender=True)
            while True:
                asked = link.read_frame(8 * BATCH)
                gathered = bytearray()
                for file, piece in struct.iter_unpack(">II", asked):
                    entry = self.manifest.files[file]
                    offset, size = entry.span(piece)
                    self.pace.reach(index, self.first[file] + piece)
                    if size <= SMALL:
                        gathered += files.read(entry, offset, size)
                    if len(gathered) >= BUFFER or size > SMALL:
                        link.write(gathered)
                        gathered.clear()
                    if size > SMALL:
                        files.send(link, entry, offset, size)
                    with self.lock:
                        self.sent += size
                link.write(gathered)
        except OSError as error:
            if error.errno == errno.EIO:
                self.faults.append("cannot read %s: %s" % (self.wanted["root"], why(error)))
        except (EOFError, IndexError, struct.error):
            pass  # the receiver has all that it wants, or has gone: its control connection says
        finally:
            link.cut()
            files.close()

    def full(self, entry: Entry) -> bytes:
        """The path of a file."""
        return os.path.join(self.root, raw(entry.path))

    def has_changed(self, entry: Entry) -> str:
        """What to say of a file that is not what was hashed."""
        return "%r changed after its manifest was made: run it again" % text(self.full(entry))

    def drop_what_all_have(self) -> None:
        """Drop pages behind the slowest receiver, less what may still be on its way."""
        low = self.pace.low()
        end = min((low or 0) - 2 * AHEAD * STREAMS, self.first[-1])
        while self.dropped < end:
            index = bisect.bisect_right(self.first, self.dropped) - 1
            last = min(end, self.first[index + 1])
            start = (self.dropped - self.first[index]) * PIECE
            with contextlib.suppress(OSError):
                path = self.full(self.manifest.files[index])
                with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as file:
                    drop(file, start, (last - self.dropped) * PIECE)
            self.dropped = last

    def result(self, seconds: float) -> Dict[str, Any]:
        """What there is to say at the end."""
        found = {
            "sent": self.sent,
            "read": disk_reads(),
            "receivers": {
                each.name: {"state": each.state, "reason": each.reason} for each in self.receivers
            },
            "seconds": round(seconds, 3),
        }
        bad = ["%s: %s" % (each.name, each.reason) for each in self.receivers if each.reason]
        if bad:
            found["error"] = "\n".join(self.faults[:1] or bad)
        return found


class Files:
    """Reads the sender's files for one connection; one is open at a time."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.entry: Entry | None = None
        self.file = -1

    def open(self, entry: Entry) -> None:
        """Have a file open, if it can be."""
        if entry is not self.entry:
            self.close()
            with contextlib.suppress(OSError):
                self.file = os.open(self.sender.full(entry), os.O_RDONLY | os.O_CLOEXEC)
            self.entry = entry

    def close(self) -> None:
        """Close what is open."""
        if self.file >= 0:
            os.close(self.file)
        self.entry, self.file = None, -1

    def mark(self, entry: Entry, whole: bool) -> bytes:
        """Whether what was just read is still what the manifest describes."""
        if whole and self.file >= 0 and entry.is_same(os.fstat(self.file)):
            return GOOD
        self.sender.faults.append(self.sender.has_changed(entry))
        return CHANGED

    def read(self, entry: Entry, offset: int, size: int) -> bytes:
        """The bytes of a small piece and their mark."""
        self.open(entry)
        data = os.pread(self.file, size, offset) if self.file >= 0 else b""
        return data.ljust(size, b"\0") + self.mark(entry, len(data) == size)

    def send(self, link: Link, entry: Entry, offset: int, size: int) -> None:
        """Send a piece from the page cache, and its mark."""
        self.open(entry)
        end = offset + size
        if self.file >= 0:
            os.posix_fadvise(self.file, offset, size, os.POSIX_FADV_WILLNEED)
            while offset < end:
                count = link.write_file(self.file, offset, end - offset)
                if count == 0:
                    break
                offset += count
        missing = end - offset
        for start in range(0, missing, BUFFER):  # it was promised; the mark says what it is worth
            link.write(bytes(min(BUFFER, missing - start)))
        link.write(self.mark(entry, missing == 0))


def disk_reads() -> int:
    """Bytes that this program had the disk read; 0 where the kernel does not count."""
    with contextlib.suppress(OSError), open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))
    return 0
