"""Role receive: asks for what is missing here, hashes it, and gives files their names."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import hmac
import json
import mmap
import os
import struct
import threading
import time
import zlib
from typing import Any, Callable, Dict, List, Set, Tuple

from cluster.remote.relay.manifest import (
    PIECE,
    Entry,
    Manifest,
    closing,
    drop,
    drop_tree,
    hash_piece,
    in_parallel,
    manifest_path,
    some,
    zeros,
)
from cluster.remote.relay.protocol import (
    AHEAD,
    BATCH,
    CHANGED,
    GOOD,
    MANIFEST_BYTES,
    SMALL,
    Piece,
    streams_of,
)
from cluster.remote.relay.tree import Survey, Tree, is_part, part_name
from cluster.remote.wire import (
    BUFFER,
    CONTROL,
    PROOF,
    Caller,
    Link,
    Progress,
    SilenceError,
    TransferError,
    why,
)

CHUNK = 1 << 20
"""Bytes that a stream writes at once; smaller files go through the page cache."""
BLOCK = 4096
"""What O_DIRECT writes are multiples of."""
DIRTY = 8
"""Pieces of a file that may wait for the disk where the page cache is kept small."""
SYNC_FILE_RANGE_WRITE, SYNC_FILE_RANGE_WRITE_AND_WAIT = 2, 7
libc = ctypes.CDLL(None, use_errno=True)
sync_file_range, fallocate = getattr(libc, "sync_file_range", None), libc.fallocate


class Incoming:
    """A file that is being received. `missing`: its pieces that have to travel."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.file = self.direct = -1
        """The open file; and once more, past the page cache, where its file system can do that."""
        # Zeros are here already: a file grows from one large hole.
        self.missing = {
            piece
            for piece in range(entry.pieces)
            if entry.digest(piece) != zeros(entry.span(piece)[1])
        }
        self.wrong: Set[int] = set()
        self.written: collections.deque[Tuple[int, int]] = collections.deque()

    def bytes(self) -> int:
        """How much has to travel."""
        return sum(self.entry.span(piece)[1] for piece in self.missing)


class Landing:
    """Where files grow until they are whole: which pieces they lack, and how they get their name.

    Every method may be called from several threads.
    """

    def __init__(
        self, tree: Tree, files: List[Entry], numbers: List[int], drop_cache: bool
    ) -> None:
        self.tree, self.drop_cache = tree, drop_cache
        self.lock = threading.Lock()
        self.incoming = {number: Incoming(files[number]) for number in numbers}
        in_parallel(self.resume, self.incoming.values())
        self.todo: collections.deque[Piece] = collections.deque(
            (number, piece)
            for number, incoming in self.incoming.items()
            for piece in sorted(incoming.missing)
        )
        self.bytes = sum(incoming.bytes() for incoming in self.incoming.values())
        disk = os.fstatvfs(tree.file)
        free = disk.f_bavail * disk.f_frsize
        if self.bytes > free:
            raise TransferError(
                "not enough room in %s: %d bytes are needed, %d are free: make room, or name "
                "another directory" % (tree.root, self.bytes, free)
            )

    def resume(self, incoming: Incoming) -> None:
        """Take what an earlier run has left of a file."""
        entry, part = incoming.entry, part_name(incoming.entry.path)
        if self.tree.find(part) is None:
            return
        with closing(self.tree.open(part, os.O_RDONLY)) as file:
            here = {
                piece
                for piece in range(entry.pieces)
                if hash_piece(file, *entry.span(piece)) == entry.digest(piece)
            }
        if here.issuperset(set(range(entry.pieces)) - incoming.missing):
            incoming.missing -= here
        else:  # something was written where a hole has to be
            self.tree.remove(part)

    def without_data(self) -> List[Incoming]:
        """Files of which nothing has to travel: empty ones, holes, parts that were whole."""
        return [incoming for incoming in self.incoming.values() if not incoming.missing]

    def take(self) -> List[Piece]:
        """What to ask for next: a large piece, or several small files."""
        batch: List[Piece] = []
        size = 0
        with self.lock:
            while self.todo and len(batch) < BATCH:
                number, piece = self.todo[0]
                size += self.incoming[number].entry.span(piece)[1]
                if batch and size > PIECE:
                    break
                batch.append(self.todo.popleft())
        return batch

    def part(self, incoming: Incoming) -> int:
        """The open file in which it grows, of its full size already, so that a hole stays one."""
        with self.lock:
            if incoming.file < 0:
                part = part_name(incoming.entry.path)
                file = self.tree.open(part, os.O_RDWR | os.O_CREAT, make=True)
                incoming.file = file
                os.ftruncate(file, incoming.entry.size)
                if incoming.entry.size >= CHUNK:
                    with contextlib.suppress(OSError):
                        incoming.direct = self.tree.open(part, os.O_RDWR | os.O_DIRECT)
                        # Into a hole, or behind the end, ext4 takes one write at a time.
                        for piece in sorted(incoming.missing):
                            allocate(file, *incoming.entry.span(piece))
            return incoming.file

    def write(self, incoming: Incoming, data: memoryview, offset: int) -> None:
        """Write at an offset: whole blocks past the page cache, the rest of a file into it."""
        whole = len(data) // BLOCK * BLOCK if incoming.direct >= 0 else 0
        try:
            write_all(incoming.direct, data[:whole], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            whole = 0  # blocks of another size, or a file system that only says that it can
        write_all(incoming.file, data[whole:], offset + whole)

    def written(self, incoming: Incoming, piece: int) -> None:
        """Have a piece written to the disk now, not all of a file at its end."""
        span = incoming.entry.span(piece)
        if span[1] <= SMALL or incoming.direct >= 0:
            return
        write_back(incoming.file, *span, wait=False)
        if self.drop_cache:
            with self.lock:
                incoming.written.append(span)
                is_full = len(incoming.written) > DIRTY
                span = incoming.written.popleft() if is_full else (0, 0)
            if is_full:
                write_back(incoming.file, *span, wait=True)
                drop(incoming.file, *span)

    def count(self, number: int, piece: int, is_right: bool) -> bool:
        """Note that a piece came; whether its file is complete. One wrong piece is asked again."""
        incoming = self.incoming[number]
        with self.lock:
            if is_right:
                incoming.missing.discard(piece)
                return not incoming.missing
            if piece in incoming.wrong:
                raise TransferError(
                    "%r arrived wrong twice (its sha256 is another): a fault of the network, or of "
                    "the memory or disk of either host" % incoming.entry.path
                )
            incoming.wrong.add(piece)
            self.todo.appendleft((number, piece))
            return False

    def finish(self, whole: List[Incoming]) -> None:
        """Give files their names, once they are on the disk: never a name without its data."""
        for incoming in whole:
            file, entry = self.part(incoming), incoming.entry
            os.fdatasync(file)
            if self.drop_cache:
                drop(file)
            dress(file, entry)
            self.tree.rename(part_name(entry.path), entry.path)
            os.close(file)
            if incoming.direct >= 0:
                os.close(incoming.direct)

    def abandon(self) -> None:
        """Remove what is not whole: it would keep a full disk full."""
        for incoming in self.incoming.values():
            with contextlib.suppress(OSError, TransferError):
                self.tree.remove(part_name(incoming.entry.path))


def allocate(file: int, offset: int, size: int) -> None:
    """Have the disk's room for a range; raises OSError, but not where that is not known."""
    if fallocate(file, 0, ctypes.c_int64(offset), ctypes.c_int64(size)):
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number))


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Write all of it."""
    while len(data):
        count = os.pwrite(file, data, offset)
        offset, data = offset + count, data[count:]


def write_back(file: int, offset: int, size: int, wait: bool) -> None:
    """Start writing a range to the disk, or wait for it."""
    how = SYNC_FILE_RANGE_WRITE_AND_WAIT if wait else SYNC_FILE_RANGE_WRITE
    if sync_file_range is not None:
        sync_file_range(file, ctypes.c_int64(offset), ctypes.c_int64(size), how)


def dress(file: int, entry: Entry) -> None:
    """Give a file the mode and the mtime that it has at the source."""
    os.fchmod(file, entry.mode)
    os.utime(file, ns=(entry.mtime_ns, entry.mtime_ns))


class Receive:
    """Role receive. The main thread keeps in touch with the sender, others do the work."""

    def __init__(self, wanted: Dict[str, Any]) -> None:
        self.wanted, self.root = wanted, wanted["root"]
        self.streams, self.stall = streams_of(wanted), wanted.get("stall", 20)
        self.caller = Caller(wanted)
        self.sender = self.caller.sender
        self.links: List[Link] = []
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.error: str | None = None
        self.progress = Progress("receiving", 0)
        self.received = self.resent = 0
        self.found: Dict[str, Any] = {}

    def run(self) -> Dict[str, Any]:
        """Receive; raises TransferError."""
        began = time.monotonic()
        try:
            os.makedirs(self.root, exist_ok=True)
        except OSError as error:
            raise TransferError("cannot make %r: %s" % (self.root, why(error))) from None
        self.tree = Tree(self.root)
        try:
            fcntl.flock(self.tree.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TransferError(
                "another transfer is writing to %s: wait for its end" % self.root
            ) from None
        control = self.dial(CONTROL)
        try:
            control.limit(self.stall)
            manifest = self.get_manifest(control)
            threading.Thread(target=self.guard, args=(self.work, manifest), daemon=True).start()
            self.converse(control)
        except SilenceError:
            self.fail(
                "nothing came from %s for %d s: the link is cut, or the host is down"
                % (self.sender, self.stall)
            )
        except (EOFError, OSError):
            self.fail("%s ended the connection: its program was stopped or died" % self.sender)
        for link in self.links:
            link.cut()
        if self.error:
            raise TransferError(self.error)
        self.found.update(received=self.received, resent=self.resent)
        return dict(self.found, seconds=round(time.monotonic() - began, 3))

    def fail(self, reason: str) -> None:
        """End with this reason; the first one counts."""
        with self.lock:
            self.error = self.error or reason
        self.over.set()

    def guard(self, work: Callable[[Any], None], argument: Any) -> None:
        """Run a thread's work; whatever ends it ends the transfer."""
        try:
            work(argument)
        except TransferError as error:
            self.fail(str(error))
        except (EOFError, ConnectionError):
            # Usually the control connection has ended too and says why; else this is the reason.
            self.over.wait(1)
            self.fail("%s ended one of the connections: run it again" % self.sender)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self.landing.abandon()
                self.fail("the disk became full while writing to %s: make room" % self.root)
            self.fail("cannot write to %s: %s" % (self.root, error))
        except Exception as error:
            self.fail("a mistake in this program: %r" % error)

    # What travels, and how.

    def dial(self, kind: int) -> Link:
        """Connect; raises TransferError when patience is over."""
        patience = self.wanted.get("patience", 60)
        link = self.caller.call(kind, patience, is_over=self.over.is_set)
        self.links.append(link)
        return link

    def get_manifest(self, control: Link) -> Manifest:
        """Take the manifest; raises TransferError if it is not what our sender signed."""
        frame = control.read_frame(MANIFEST_BYTES)
        proof, body = frame[:PROOF], frame[PROOF:]
        if not hmac.compare_digest(proof, control.sign(b"manifest" + body)):
            raise TransferError(
                "the manifest of %s was changed on the way: run it again" % self.sender
            )
        return Manifest.parse(json.loads(zlib.decompress(body)))

    def converse(self, control: Link) -> None:
        """Give signs of life and hear the sender's, until all is over."""
        is_over = False
        while not is_over:
            is_over = self.over.wait(0.5)
            progress = self.progress
            if progress.total and not is_over:
                progress.tell()
            news = {"done": progress.done, "total": progress.total, "error": self.error}
            try:
                control.write_frame(json.dumps(dict(news, over=is_over)).encode())
                control.read_frame()
            except (OSError, EOFError):
                if not is_over:
                    raise

    def work(self, manifest: Manifest) -> None:
        """Everything from looking at what is here to the last name."""
        survey = Survey(self.tree, manifest, bool(self.wanted.get("verify")))
        lacking = survey.different.union(survey.missing)
        numbers = [n for n, entry in enumerate(manifest.files) if entry.path in lacking]
        drop_cache = bool(self.wanted.get("drop_cache"))
        self.landing = Landing(self.tree, manifest.files, numbers, drop_cache)
        self.progress = Progress("receiving", self.landing.bytes)
        self.landing.finish(self.landing.without_data())
        if self.landing.todo:
            threads = [
                threading.Thread(target=self.guard, args=(self.stream, number), daemon=True)
                for number in range(self.streams)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if not self.error:
            self.complete(manifest, survey, lacking)
            self.over.set()

    def stream(self, number: int) -> None:
        """One connection: ask for pieces, a few requests ahead, and take them."""
        link = self.dial(number)
        buffer = memoryview(mmap.mmap(-1, CHUNK))  # whole pages
        asked: collections.deque[List[Piece]] = collections.deque()
        while not self.error:
            while len(asked) < AHEAD:
                batch = self.landing.take()
                if not batch:
                    break
                link.write_frame(b"".join(struct.pack(">II", *each) for each in batch))
                asked.append(batch)
            if not asked:
                break
            whole = [each for each in asked.popleft() if self.piece(link, buffer, *each)]
            self.landing.finish([self.landing.incoming[each[0]] for each in whole])
        link.cut()

    def piece(self, link: Link, buffer: memoryview, number: int, piece: int) -> bool:
        """Write a piece while it comes, and judge it; whether its file is complete."""
        incoming = self.landing.incoming[number]
        self.landing.part(incoming)
        digest = hashlib.sha256()
        offset, size = incoming.entry.span(piece)
        end = offset + size
        while offset < end:
            chunk = buffer[: end - offset]
            for start in range(0, len(chunk), BUFFER):
                view = chunk[start : start + BUFFER]
                link.fill(view)
                digest.update(view)
            self.landing.write(incoming, chunk, offset)
            self.progress.add(len(chunk))
            offset += len(chunk)
        mark = link.read(1)
        if mark == CHANGED:
            raise TransferError(
                "%r changed on %s after its manifest was made: run it again"
                % (incoming.entry.path, self.wanted["sender"])
            )
        is_right = mark == GOOD and digest.digest() == incoming.entry.digest(piece)
        self.landing.written(incoming, piece)
        with self.lock:
            self.received += size
            self.resent += 0 if is_right else size
        if not is_right:
            self.progress.add(-size)
        return self.landing.count(number, piece, is_right)

    def complete(self, manifest: Manifest, survey: Survey, lacking: Set[str]) -> None:
        """What is left when every file is there."""
        for entry in survey.touched:
            with closing(self.tree.open(entry.path, os.O_RDONLY)) as file:
                dress(file, entry)
        for entry in manifest.links:
            if entry.path in lacking:
                self.tree.link(entry.path, entry.target)
        extra = self.tree.strays(manifest)
        remove = bool(self.wanted.get("delete"))
        for name in extra if remove else filter(is_part, extra):
            self.tree.remove(name)
        extra = [name for name in extra if not is_part(name)]
        rows = []
        for entry in manifest.entries:
            info = self.tree.find(entry.path)
            if info is not None:
                rows.append(entry._replace(ino=info.st_ino, ctime_ns=info.st_ctime_ns))
        Manifest(rows).save(manifest_path(self.wanted))
        if self.wanted.get("drop_cache"):
            drop_tree(self.wanted)
        self.found = {
            "digest": manifest.digest,
            "files": len(manifest.files),
            "kept": manifest.bytes - self.landing.bytes,
            "extra": some(extra),
            "deleted": len(extra) if remove else 0,
        }
