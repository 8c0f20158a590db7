"""Brings a directory (a model) from one host to others over the fabric, and proves that it arrived.

Started like every program of remote/: `python3 - relay JSON`, its text over stdin. Roles:

manifest  On the source. Lists `root` with the sha256 of every piece of every file, into a small
          file beside the root, which is also the cache: a second run reads no data. Keys: root;
          manifest (path of that file; default ROOT.manifest.json), only ([path in root]; what
          links in there point to comes along), exclude ([fnmatch pattern]), drop_cache. Result:
          digest (identifies all of it), files, links, bytes, hashed (bytes read), seconds, path.
check     On a receiver: does `root` hold what its saved manifest says? Keys: root, manifest; digest
          (what the source has: {"state": "stale"} if the saved one is another, "none" without
          one), verify (read and hash everything). Result: state (ok, different, stale, none),
          digest, missing, different, extra: each {count, names (at most 20)}; touched (files of
          the right content and another mtime: what has that is hashed), hashed, seconds. The exit
          code is 0 in every state.
send      On the source, after `manifest`. Keys: root, manifest, digest; address (ours on the
          fabric, the only one that it binds), ports (the first that is free is taken), receivers
          [{name, address}]; streams, patience, stall, drop_cache. Ends when every receiver is
          done, failed, or absent for `patience` seconds. Result: sent, read (bytes from the
          disk), receivers {name: {state (done, failed, absent), reason}}, seconds.
receive   On every other host, at the same time. Keys: root, manifest; name (ours), index (ours in
          the sender's list), source (our fabric address), sender (its name), address, ports;
          streams, patience, stall, drop_cache, verify (hash what is here already), delete (remove
          what the source does not have; else it is only reported). Result: digest, files,
          received (bytes over the wire), kept, resent (bytes each), extra, deleted, seconds.
drop      Drops the pages of `root` from the page cache. Result: files, bytes.

Defaults: streams 4, patience 60 and stall 20 (seconds; without any sign of life the other side is
given up), the rest false. The last line of stdout is one JSON object: the result, with cpu_seconds
and peak_bytes, or {"error": why}; it is left out where `result` is false. Before it come lines for
people. An error is also on stderr. Exit code 0: done. 1: not.

TOKEN is secret and argv is not, so it comes inside the text: keyed(source("relay"), token).
It never crosses the wire: both sides prove with HMAC that they know it, and the manifest is signed
with it, so that every byte is checked against hashes that only the deployment's own sender can
have sent. Confidentiality is the fabric's.

Receivers ask, the sender answers: a receiver finds out what it lacks, asks for pieces over several
connections, hashes each before it counts, and renames a file when all of it is there and on disk.
Hashes are per piece (16 MiB), not per file: one file is hashed by several cores on both sides, a
piece that arrived wrong is all that is sent again, and what an interrupted run has left in
.NAME.relay.part is used. Pieces of zeros (sparse files) are known by their hash and never travel.

A symlink inside the root stays one (Hugging Face: snapshots/COMMIT/x -> ../../blobs/SHA). One that
leads to a file outside is followed and travels as that file: a plain model directory often links
shards from another disk, and the other hosts do not have what it points to. Links to nothing or to
a directory outside are errors.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import ctypes
import errno
import fcntl
import fnmatch
import hashlib
import hmac
import itertools
import json
import os
import secrets
import selectors
import socket
import stat
import struct
import sys
import threading
import time
import zlib
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Sequence,
    Set,
    Tuple,
)

TOKEN = ""

PIECE = 16 << 20
"""Bytes that are hashed, asked for and sent again as one."""
BUFFER = 256 << 10
"""Bytes that one thread has in memory: a core's own cache holds them until they are written."""
SMALL = 256 << 10
"""Up to this size files are gathered before they are sent."""
BATCH = 64
"""Files in one request; so many per stream are open at the same time."""
STREAMS = 8
"""At most, per receiver."""
AHEAD = 2
"""Requests that a stream has under way."""
WINDOW = 24
"""Pieces by which a receiver may be ahead of the slowest, which then finds them in the cache."""
LAG_SECONDS = 10
"""A receiver that gets nothing for that long is not waited for."""
GREETING_SECONDS = 5
STRANGERS = 32
"""Connections that may be open without having shown the token."""
PROGRESS_SECONDS = 2
SHOWN_NAMES = 20
MANIFEST_BYTES = 256 << 20
GREETING = b"RELAY 1\n"
NONCE, PROOF = 16, 32
ANSWER = struct.Struct(">16sHH32s")
CONTROL = 0xFFFF
"""The stream that carries the manifest and signs of life, instead of data."""
GOOD, CHANGED = b"\0", b"\1"
PART = b".relay.part"
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
DIRTY = 8
"""Pieces of a file that may wait for the disk where the page cache is kept small."""
SYNC_FILE_RANGE_WRITE, SYNC_FILE_RANGE_WRITE_AND_WAIT = 2, 7
sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)

Piece = Tuple[int, int]
"""(number of the file in the manifest, number of the piece in the file)"""


class RelayError(Exception):
    """What goes wrong, for a person: what, where, why, what to do."""


def keyed(text: str, token: str) -> str:
    """The text of this program with the token in it: a new hexadecimal one for every transfer."""
    if not token.isalnum():
        raise ValueError("a token has letters and digits only")
    return text.replace('\nTOKEN = ""\n', '\nTOKEN = "%s"\n' % token, 1)


def text(name: bytes) -> str:
    """A file name as JSON can carry it, whatever its bytes and this host's locale are."""
    return name.decode("utf-8", "surrogateescape")


def raw(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def some(names: Iterable[str]) -> Dict[str, Any]:
    """A list that may be long, in short; without what JSON readers elsewhere choke on."""
    every = list(names)
    shown = [raw(name).decode("utf-8", "backslashreplace") for name in every[:SHOWN_NAMES]]
    return {"count": len(every), "names": shown}


def say(line: str) -> None:
    print(line, flush=True)


def why(error: OSError) -> str:
    return error.strerror or str(error)


class Entry(NamedTuple):
    """A file or a symlink. `sha256`: of every piece, hexadecimal, joined."""

    path: str
    kind: str
    size: int
    mtime_ns: int
    mode: int
    sha256: str = ""
    target: str = ""
    ino: int = 0
    ctime_ns: int = 0

    @property
    def pieces(self) -> int:
        """How many pieces the file has; an empty file has none."""
        return (self.size + PIECE - 1) // PIECE

    def span(self, piece: int) -> Tuple[int, int]:
        """Return (offset, size) of a piece."""
        return piece * PIECE, min(PIECE, self.size - piece * PIECE)

    def digest(self, piece: int) -> bytes:
        """The sha256 of a piece."""
        return bytes.fromhex(self.sha256[piece * 64 : piece * 64 + 64])

    def is_like(self, info: os.stat_result) -> bool:
        """Whether a file has this size and mtime."""
        return (self.size, self.mtime_ns) == (info.st_size, info.st_mtime_ns)

    def is_same(self, info: os.stat_result) -> bool:
        """Whether a file is the very one that was hashed; ctime cannot be set back."""
        own = (self.ino, self.ctime_ns)
        return self.is_like(info) and own == (info.st_ino, info.st_ctime_ns)


class Manifest:
    """What a directory holds, in the order in which it travels."""

    def __init__(self, entries: List[Entry]) -> None:
        self.entries = entries
        self.files = [entry for entry in entries if entry.kind == "file"]
        self.links = [entry for entry in entries if entry.kind == "symlink"]
        self.bytes = sum(entry.size for entry in self.files)
        self.digest = hashlib.sha256(self.wire()).hexdigest()

    def wire(self) -> bytes:
        """What another host may know of it: without inode numbers and the like."""
        return json.dumps([entry[:7] for entry in self.entries]).encode()

    @classmethod
    def parse(cls, rows: Any) -> Manifest:
        """Take rows from outside; raise RelayError for what no honest sender would say."""
        entries = [Entry(*row) for row in rows]
        for entry in entries:
            numbers = (entry.size, entry.mtime_ns, entry.mode)
            good = is_inside(raw(entry.path)) and all(isinstance(n, int) for n in numbers)
            if entry.kind == "file":
                good = good and entry.size >= 0 and len(entry.sha256) == 64 * entry.pieces
            else:
                path, target = raw(entry.path), raw(entry.target)
                good = good and entry.kind == "symlink" and is_link_inside(path, target)
            if not good:
                raise RelayError("the manifest has an entry that leads out: %r" % entry.path)
        return cls(entries)

    @classmethod
    def load(cls, path: str) -> Manifest | None:
        """Read a saved one; None where there is none that can be used."""
        try:
            with open(path, encoding="utf-8") as file:
                return cls.parse(json.load(file)["entries"])
        except (OSError, ValueError, TypeError, KeyError, RelayError):
            return None

    def save(self, path: str) -> None:
        """Write it, all or nothing."""
        temporary = "%s.%d" % (path, os.getpid())
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump({"fields": Entry._fields, "entries": self.entries}, file)
            os.replace(temporary, path)
        except OSError as error:
            raise RelayError("cannot write the manifest %s: %s" % (path, why(error))) from None


def manifest_path(wanted: Dict[str, Any]) -> str:
    return str(wanted.get("manifest") or wanted["root"].rstrip("/") + ".manifest.json")


def is_inside(path: bytes) -> bool:
    """Whether a path from outside is a plain one below the root."""
    return b"\0" not in path and all(part not in (b"", b".", b"..") for part in path.split(b"/"))


def is_link_inside(path: bytes, target: bytes) -> bool:
    """Whether a link at `path` stays in the root: first some "..", then names, nothing between."""
    up, rest = 0, target
    while rest == b".." or rest.startswith(b"../"):
        up, rest = up + 1, rest[3:]
    return up <= path.count(b"/") and (is_inside(rest) if rest else up > 0)


def walk(
    root: bytes, only: Sequence[str], exclude: Sequence[str]
) -> Iterator[Tuple[bytes, bytes | None, os.stat_result]]:
    """Yield (path, target of a link or None, stat) of everything; raises RelayError."""
    home = os.path.realpath(root)
    todo = [raw(path.strip("/")) for path in only] or [b""]
    seen: Set[bytes] = set()
    while todo:
        path = todo.pop()
        name = os.path.basename(path)
        is_ours = name.startswith(b".") and name.endswith(PART)
        if path in seen or is_ours or any(fnmatch.fnmatch(text(path), each) for each in exclude):
            continue
        seen.add(path)
        full = os.path.join(home, path) if path else home
        try:
            info = os.lstat(full)
            if stat.S_ISDIR(info.st_mode):
                todo += [os.path.join(path, each) for each in os.listdir(full)]
                continue
            if stat.S_ISLNK(info.st_mode):
                target, info = resolve(home, path)
                if target is not None:
                    if only:
                        todo.append(os.path.normpath(os.path.join(os.path.dirname(path), target)))
                    yield path, target, info
                    continue
        except OSError as error:
            raise RelayError("cannot read %r: %s" % (text(full), why(error))) from None
        if not stat.S_ISREG(info.st_mode):
            raise RelayError(
                "%r is no file, directory or link (a socket, pipe or device): remove it or name it "
                "under exclude" % text(full)
            )
        yield path, None, info


def resolve(home: bytes, path: bytes) -> Tuple[bytes | None, os.stat_result]:
    """Return (target, stat of the link), or (None, stat of the file) for one that is followed."""
    full = os.path.join(home, path)
    target, end = os.readlink(full), os.path.realpath(full)
    try:
        info = os.stat(full)
    except OSError as error:
        raise RelayError(
            "%r is a link to %r, which cannot be read (%s): an unfinished download? Complete it or "
            "remove the link" % (text(full), text(target), why(error))
        ) from None
    if end.startswith(home + b"/"):
        if not is_link_inside(path, target):
            target = os.path.relpath(end, os.path.dirname(full))
        return target, os.lstat(full)
    if stat.S_ISDIR(info.st_mode):
        raise RelayError(
            "%r is a link to the directory %r outside of %r, which the other hosts do not have: "
            "move it inside" % (text(full), text(target), text(home))
        )
    return None, info


def in_parallel(work: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Call work(item) in as many threads as there are cores; the first exception ends all."""
    rest, lock = iter(items), threading.Lock()
    failures: List[Exception] = []

    def run() -> None:
        while not failures:
            with lock:
                item = next(rest, None)
            if item is None:
                return
            try:
                work(item)
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(16, cores()))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def cores() -> int:
    return len(os.sched_getaffinity(0))


ZEROS: Dict[int, bytes] = {}


def zeros(size: int) -> bytes:
    """The sha256 of so many zeros."""
    if size not in ZEROS:
        whole, rest = divmod(size, BUFFER)
        digest, block = hashlib.sha256(), bytes(BUFFER)
        for _ in range(whole):
            digest.update(block)
        digest.update(block[:rest])
        ZEROS[size] = digest.digest()
    return ZEROS[size]


def hash_piece(file: int, offset: int, size: int) -> bytes | None:
    """The sha256 of a part of a file, holes not read; None where the file ends before."""
    try:
        if os.fstat(file).st_size >= offset + size <= os.lseek(file, offset, os.SEEK_DATA):
            return zeros(size)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole up to the end of the file
            return zeros(size) if os.fstat(file).st_size >= offset + size else None
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(BUFFER, size)))
    end = offset + size
    while offset < end:
        count = os.preadv(file, [buffer[: end - offset]], offset)
        if count == 0:
            return None
        digest.update(buffer[:count])
        offset += count
    return digest.digest()


def drop(file: int, offset: int = 0, size: int = 0) -> None:
    with contextlib.suppress(OSError):
        os.posix_fadvise(file, offset, size, os.POSIX_FADV_DONTNEED)


def streams_of(wanted: Dict[str, Any]) -> int:
    return max(1, min(STREAMS, int(wanted.get("streams", 4))))


def make_manifest(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """Role manifest."""
    began, path, root = time.monotonic(), manifest_path(wanted), os.fsencode(wanted["root"])
    if not os.path.isdir(root):
        raise RelayError("%r is no directory here" % wanted["root"])
    saved = Manifest.load(path)
    known = {entry.path: entry for entry in saved.entries} if saved else {}
    entries: Dict[bytes, Entry] = {}
    digests: Dict[bytes, bytearray] = {}
    for name, target, info in walk(root, wanted.get("only", ()), wanted.get("exclude", ())):
        kind = "file" if target is None else "symlink"
        size, mtime = (info.st_size, info.st_mtime_ns) if target is None else (0, 0)
        entry = Entry(text(name), kind, size, mtime, stat.S_IMODE(info.st_mode) & 0o777)
        if target is not None:
            entries[name] = entry._replace(target=text(target), mode=0)
            continue
        entry = entry._replace(ino=info.st_ino, ctime_ns=info.st_ctime_ns)
        old = known.get(entry.path)
        if old is not None and old.kind == "file" and old.is_same(info):
            entry = entry._replace(sha256=old.sha256)
        else:
            digests[name] = bytearray(32 * entry.pieces)
        entries[name] = entry
    total = sum(entries[name].size for name in digests)
    progress = Progress("reading %s" % wanted["root"], total)

    def read(unit: Tuple[bytes, int]) -> None:
        name, piece = unit
        offset, size = entries[name].span(piece)
        try:
            file = os.open(os.path.join(root, name), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RelayError("cannot read %r: %s" % (text(name), why(error))) from None
        with closing(file):
            digest = hash_piece(file, offset, size)
            if digest is None:
                raise RelayError("%r became shorter while it was read" % text(name))
            if wanted.get("drop_cache"):
                drop(file, offset, size)
        digests[name][piece * 32 : piece * 32 + 32] = digest
        progress.add(size)

    in_parallel(read, ((name, n) for name in digests for n in range(entries[name].pieces)))
    for name, digest in digests.items():
        entries[name] = entries[name]._replace(sha256=digest.hex())
    manifest = Manifest([entries[name] for name in sorted(entries)])
    manifest.save(path)
    return {
        "digest": manifest.digest,
        "files": len(manifest.files),
        "links": len(manifest.links),
        "bytes": manifest.bytes,
        "hashed": total,
        "seconds": round(time.monotonic() - began, 3),
        "path": path,
    }


@contextlib.contextmanager
def closing(file: int) -> Iterator[int]:
    try:
        yield file
    finally:
        os.close(file)


class Progress:
    """Says how far it is, at most every PROGRESS_SECONDS."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self.began = self.spoken = time.monotonic()
        self.lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count bytes that are done."""
        with self.lock:
            self.done += count
            self.tell()

    def tell(self) -> None:
        """Say it, if there is time again."""
        now = time.monotonic()
        if now - self.spoken < PROGRESS_SECONDS:
            return
        self.spoken = now
        rate = self.done / (now - self.began)
        left = "%d s left" % ((self.total - self.done) / rate) if rate else "waiting"
        gigabytes = (self.what, self.done / 1e9, self.total / 1e9, rate / 1e9, left)
        say("%s: %.2f of %.2f GB, %.2f GB/s, %s" % gigabytes)


class Tree:
    """A directory at a receiver; every path is walked name by name, and no link is followed."""

    def __init__(self, root: str) -> None:
        self.root = root
        try:
            self.file = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise RelayError("cannot open the directory %r: %s" % (root, why(error))) from None

    @contextlib.contextmanager
    def at(self, path: str, make: bool = False) -> Iterator[Tuple[int, bytes]]:
        """Give (directory, name) of a path; raises RelayError where something is in the way."""
        *parents, name = raw(path).split(b"/")
        directory = os.dup(self.file)
        try:
            for parent in parents:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(parent, 0o755, dir_fd=directory)
                below = os.open(parent, DIRECTORY, dir_fd=directory)
                os.close(directory)
                directory = below
            yield directory, name
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise RelayError(
                    "%r: a link, or a file instead of a directory, is in the way (links are not "
                    "written through): remove it" % os.path.join(self.root, path)
                ) from None
            raise
        finally:
            os.close(directory)

    def find(self, path: str) -> os.stat_result | None:
        """What is at a path, links not followed; None where nothing is."""
        try:
            with self.at(path) as (directory, name):
                return os.lstat(name, dir_fd=directory)
        except (FileNotFoundError, RelayError):
            return None

    def open(self, path: str, flags: int, make: bool = False) -> int:
        """Open a regular file."""
        with self.at(path, make) as (directory, name):
            flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            file = os.open(name, flags, 0o600, dir_fd=directory)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise RelayError("%r is no file: remove it" % os.path.join(self.root, path))
        return file

    def rename(self, old: str, new: str) -> None:
        """Rename within one directory."""
        with self.at(old) as (directory, name):
            last = raw(new).rpartition(b"/")[2]
            try:
                os.rename(name, last, src_dir_fd=directory, dst_dir_fd=directory)
            except IsADirectoryError:
                raise RelayError(
                    "%r is a directory where a file belongs: remove it"
                    % os.path.join(self.root, new)
                ) from None

    def link(self, path: str, target: str) -> None:
        """Make a symlink, in one step where another is."""
        temporary = part_name(path)
        with self.at(path, make=True) as (directory, _):
            name = raw(temporary).rpartition(b"/")[2]
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
            os.symlink(raw(target), name, dir_fd=directory)
        self.rename(temporary, path)

    def remove(self, path: str) -> None:
        """Remove a file, and directories that are empty then."""
        with self.at(path) as (directory, name), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
        while "/" in path:
            path = path.rpartition("/")[0]
            try:
                with self.at(path) as (directory, name):
                    os.rmdir(name, dir_fd=directory)
            except OSError:
                return

    def names(self) -> Iterator[str]:
        """Every path of a file, a link or something else that is no directory."""
        todo = [b""]
        while todo:
            path = todo.pop()
            with os.scandir(os.path.join(os.fsencode(self.root), path)) as entries:
                for entry in entries:
                    below = os.path.join(path, entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(below)
                    else:
                        yield text(below)

    def strays(self, manifest: Manifest) -> List[str]:
        """What is here and not in the manifest, leftover parts included."""
        expected = {entry.path for entry in manifest.entries}
        return sorted(name for name in self.names() if name not in expected)


def part_name(path: str) -> str:
    """Where a file grows: beside its place, hidden."""
    head, slash, name = path.rpartition("/")
    short = raw(name) if len(raw(name)) < 240 else hashlib.sha256(raw(name)).hexdigest().encode()
    return head + slash + text(b"." + short + PART)


def is_part(path: str) -> bool:
    name = raw(path).rpartition(b"/")[2]
    return name.startswith(b".") and name.endswith(PART)


class Survey:
    """Compares a tree with a manifest. Raises nothing for what is missing: that is the result."""

    def __init__(self, tree: Tree, manifest: Manifest, verify: bool = False) -> None:
        self.tree, self.manifest = tree, manifest
        self.missing: List[str] = []
        self.different: Set[str] = set()
        self.touched: List[Entry] = []
        """Same content, other mtime or mode."""
        self.hashed = 0
        self.lock = threading.Lock()
        unsure = []
        for entry in manifest.entries:
            info = tree.find(entry.path)
            if info is None:
                self.missing.append(entry.path)
            elif entry.kind == "symlink":
                if not stat.S_ISLNK(info.st_mode) or self.target(entry) != entry.target:
                    self.different.add(entry.path)
            elif not stat.S_ISREG(info.st_mode) or info.st_size != entry.size:
                self.different.add(entry.path)
            else:
                if verify or not entry.is_like(info):
                    unsure.append(entry)
                if not entry.is_like(info) or stat.S_IMODE(info.st_mode) != entry.mode:
                    self.touched.append(entry)
        whole = sum(entry.size for entry in unsure)
        self.progress = Progress("hashing what is in %s" % tree.root, whole)
        in_parallel(self.compare, ((e, n) for e in unsure for n in range(e.pieces)))
        self.touched = [entry for entry in self.touched if entry.path not in self.different]

    def target(self, entry: Entry) -> str:
        """What a link points to here."""
        with self.tree.at(entry.path) as (directory, name):
            return text(os.readlink(name, dir_fd=directory))

    def compare(self, unit: Tuple[Entry, int]) -> None:
        """Hash a piece of what is here."""
        entry, piece = unit
        if entry.path in self.different:
            return
        with closing(self.tree.open(entry.path, os.O_RDONLY)) as file:
            offset, size = entry.span(piece)
            digest = hash_piece(file, offset, size)
        self.progress.add(size)
        with self.lock:
            self.hashed += size
            if digest != entry.digest(piece):
                self.different.add(entry.path)


def check(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """Role check."""
    began, manifest = time.monotonic(), Manifest.load(manifest_path(wanted))
    if manifest is None or not os.path.isdir(wanted["root"]):
        return {"state": "none"}
    if wanted.get("digest") not in (None, manifest.digest):
        return {"state": "stale", "digest": manifest.digest}
    tree = Tree(wanted["root"])
    survey = Survey(tree, manifest, bool(wanted.get("verify")))
    return {
        "state": "different" if survey.missing or survey.different else "ok",
        "digest": manifest.digest,
        "missing": some(survey.missing),
        "different": some(sorted(survey.different)),
        "extra": some(name for name in tree.strays(manifest) if not is_part(name)),
        "touched": len(survey.touched),
        "hashed": survey.hashed,
        "seconds": round(time.monotonic() - began, 3),
    }


class Link:
    """One connection. Blocking: whoever wants to end it calls cut()."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.nonces = b""
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fill(self, view: memoryview) -> None:
        """Read exactly as much; EOFError when the other side has gone."""
        while len(view):
            count = self.peer.recv_into(view, len(view), socket.MSG_WAITALL)
            if count == 0:
                raise EOFError
            view = view[count:]

    def read(self, count: int) -> bytes:
        """Read exactly as much; EOFError when the other side has gone."""
        data = bytearray(count)
        self.fill(memoryview(data))
        return bytes(data)

    def read_frame(self, limit: int = 1 << 20) -> bytes:
        """Read what write_frame has sent."""
        (size,) = struct.unpack(">I", self.read(4))
        if size > limit:
            raise EOFError
        return self.read(size)

    def write_frame(self, data: bytes) -> None:
        """Send bytes with their length before them."""
        self.peer.sendall(struct.pack(">I", len(data)) + data)

    def sign(self, what: bytes) -> bytes:
        """Prove to the other side of this connection that we know the token and say this."""
        return hmac.new(TOKEN.encode(), self.nonces + what, "sha256").digest()

    def cut(self) -> None:
        """End it, whoever waits for it."""
        with contextlib.suppress(OSError):
            self.peer.shutdown(socket.SHUT_RDWR)


class Stranger:
    """A connection that has not shown the token."""

    def __init__(self, peer: socket.socket, address: str) -> None:
        self.link = Link(peer)
        self.address = address
        self.until = time.monotonic() + GREETING_SECONDS
        self.heard = b""


class Door:
    """Lets in who knows the token, whatever others try: few bytes, few seconds, few at a time."""

    def __init__(self, listener: socket.socket, addresses: List[str]) -> None:
        self.listener, self.addresses = listener, addresses
        self.strangers: Dict[socket.socket, Stranger] = {}
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)

    def admit(self, seconds: float) -> Iterator[Tuple[Link, int, int]]:
        """Wait, and give (connection, receiver, stream) of everyone who comes in."""
        for key, _ in self.selector.select(seconds):
            if key.fileobj is self.listener:
                self.greet()
                continue
            assert isinstance(key.fileobj, socket.socket)
            stranger = self.strangers.get(key.fileobj)
            come = self.hear(stranger) if stranger else None
            if come:
                yield come
        now = time.monotonic()
        for stranger in [each for each in self.strangers.values() if each.until < now]:
            self.send_away(stranger)

    def greet(self) -> None:
        """Take connections, and ask each for its proof."""
        with contextlib.suppress(OSError):
            for _ in range(STRANGERS):
                peer, (address, *_) = self.listener.accept()
                if address not in self.addresses:
                    peer.close()
                    continue
                if len(self.strangers) >= STRANGERS:
                    # The one that has waited longest is the one least likely to be ours.
                    self.send_away(next(iter(self.strangers.values())))
                peer.setblocking(False)
                stranger = Stranger(peer, address)
                stranger.link.nonces = secrets.token_bytes(NONCE)
                self.strangers[peer] = stranger
                self.selector.register(peer, selectors.EVENT_READ)
                peer.send(GREETING + stranger.link.nonces)

    def hear(self, stranger: Stranger) -> Tuple[Link, int, int] | None:
        """Take what a stranger says; what admit() gives once it has proven itself."""
        link = stranger.link
        try:
            heard = link.peer.recv(ANSWER.size - len(stranger.heard))
        except OSError:
            heard = b""
        stranger.heard += heard
        if heard and len(stranger.heard) < ANSWER.size:
            return None
        if heard:
            nonce, index, stream, proof = ANSWER.unpack(stranger.heard)
            link.nonces += nonce
            who = stranger.heard[NONCE:-PROOF]
            if hmac.compare_digest(proof, link.sign(b"receive" + who)) and (
                index < len(self.addresses) and self.addresses[index] == stranger.address
            ):
                self.forget(stranger)
                link.peer.setblocking(True)
                link.peer.sendall(link.sign(b"send" + who))
                return link, index, stream
        self.send_away(stranger)
        return None

    def forget(self, stranger: Stranger) -> None:
        """It is let in or sent away."""
        self.selector.unregister(stranger.link.peer)
        del self.strangers[stranger.link.peer]

    def send_away(self, stranger: Stranger) -> None:
        """Close a connection."""
        self.forget(stranger)
        stranger.link.peer.close()

    def close(self) -> None:
        """Close everything that is not let in."""
        for stranger in list(self.strangers.values()):
            self.send_away(stranger)
        self.listener.close()


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
        self.streams, self.stall = streams_of(wanted), wanted.get("stall", 20)
        manifest = Manifest.load(manifest_path(wanted))
        if manifest is None or manifest.digest != wanted["digest"]:
            raise RelayError(
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
        """Send; raises RelayError where it cannot begin. Failures of receivers are a result."""
        began = time.monotonic()
        for entry in self.manifest.files:
            try:
                same = entry.is_same(os.stat(self.full(entry)))
            except OSError:
                same = False
            if not same:
                raise RelayError(self.has_changed(entry))
        door = Door(self.listen(), [each.address for each in self.receivers])
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

    def listen(self) -> socket.socket:
        """Listen on the first port that is free."""
        address, taken = self.wanted["address"], errno.EADDRINUSE
        for port in self.wanted["ports"]:
            listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
                listener.listen(128)
                return listener
            except OSError as error:
                listener.close()
                if error.errno != taken:
                    raise RelayError(
                        "cannot listen on the fabric address %s: %s" % (address, why(error))
                    ) from None
        raise RelayError(
            "on %s every port of %s is taken: is another transfer running?"
            % (address, self.wanted["ports"])
        )

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
        elif stream < self.streams and receiver.state == "here":
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
            # A timeout of the kernel: one of Python's would make the socket non-blocking.
            set_timeouts(link.peer, self.stall)
            body = zlib.compress(self.manifest.wire(), 1)
            link.write_frame(link.sign(b"manifest" + body) + body)
            while receiver.state == "here":
                news = json.loads(link.read_frame())
                receiver.total, receiver.done = news["total"], news["done"]
                if news["over"]:
                    receiver.reason = news["error"] or ""
                    receiver.state = "failed" if news["error"] else "done"
                link.write_frame(b"")
        except (BlockingIOError, ValueError, KeyError):
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
                        link.peer.sendall(gathered)
                        gathered.clear()
                    if size > SMALL:
                        files.send(link.peer, entry, offset, size)
                    with self.lock:
                        self.sent += size
                link.peer.sendall(gathered)
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
        end = min((low or 0) - 2 * AHEAD * self.streams, self.first[-1])
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

    def send(self, peer: socket.socket, entry: Entry, offset: int, size: int) -> None:
        """Send a piece from the page cache, and its mark."""
        self.open(entry)
        end = offset + size
        if self.file >= 0:
            os.posix_fadvise(self.file, offset, size, os.POSIX_FADV_WILLNEED)
            while offset < end:
                count = os.sendfile(peer.fileno(), self.file, offset, end - offset)
                if count == 0:
                    break
                offset += count
        missing = end - offset
        for start in range(0, missing, BUFFER):  # it was promised; the mark says what it is worth
            peer.sendall(bytes(min(BUFFER, missing - start)))
        peer.sendall(self.mark(entry, missing == 0))


def set_timeouts(peer: socket.socket, seconds: float) -> None:
    packed = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)


class Incoming:
    """A file that is being received. `missing`: its pieces that have to travel."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.file = -1
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
            raise RelayError(
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
            return incoming.file

    def written(self, incoming: Incoming, piece: int) -> None:
        """Have a piece written to the disk now, not all of a file at its end."""
        span = incoming.entry.span(piece)
        if span[1] <= SMALL:
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
                raise RelayError(
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

    def abandon(self) -> None:
        """Remove what is not whole: it would keep a full disk full."""
        for incoming in self.incoming.values():
            with contextlib.suppress(OSError, RelayError):
                self.tree.remove(part_name(incoming.entry.path))


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
        self.sender = "%s at %s" % (wanted["sender"], wanted["address"])
        self.port = 0
        self.links: List[Link] = []
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.error: str | None = None
        self.progress = Progress("receiving", 0)
        self.received = self.resent = 0
        self.found: Dict[str, Any] = {}

    def run(self) -> Dict[str, Any]:
        """Receive; raises RelayError."""
        began = time.monotonic()
        try:
            os.makedirs(self.root, exist_ok=True)
        except OSError as error:
            raise RelayError("cannot make %r: %s" % (self.root, why(error))) from None
        self.tree = Tree(self.root)
        try:
            fcntl.flock(self.tree.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RelayError(
                "another transfer is writing to %s: wait for its end" % self.root
            ) from None
        control = self.dial(CONTROL)
        try:
            set_timeouts(control.peer, self.stall)
            manifest = self.get_manifest(control)
            threading.Thread(target=self.guard, args=(self.work, manifest), daemon=True).start()
            self.converse(control)
        except BlockingIOError:
            self.fail(
                "nothing came from %s for %d s: the link is cut, or the host is down"
                % (self.sender, self.stall)
            )
        except (EOFError, OSError):
            self.fail("%s ended the connection: its program was stopped or died" % self.sender)
        for link in self.links:
            link.cut()
        if self.error:
            raise RelayError(self.error)
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
        except RelayError as error:
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

    def dial(self, stream: int) -> Link:
        """Connect, and prove each other; raises RelayError when patience is over."""
        until = time.monotonic() + self.wanted.get("patience", 60)
        while True:
            reasons = []
            for port in [self.port] if self.port else self.wanted["ports"]:
                try:
                    link = self.try_port(port, stream)
                except EOFError:
                    reasons.append("port %d: what listens there does not let us in" % port)
                except OSError as error:
                    if error.errno == errno.EADDRNOTAVAIL:
                        raise RelayError(
                            "this host has no address %s: check its fabric address and interface"
                            % self.wanted["source"]
                        ) from None
                    reasons.append("port %d: %s" % (port, why(error)))
                else:
                    self.port = port
                    self.links.append(link)
                    return link
            if time.monotonic() > until or self.over.is_set():
                raise RelayError(
                    "cannot reach the sender %s from %s: %s"
                    % (self.sender, self.wanted["source"], "; ".join(reasons))
                )
            time.sleep(0.1)

    def try_port(self, port: int, stream: int) -> Link:
        """Connect; raises EOFError when it is not our sender that listens there."""
        place = (self.wanted["address"], port)
        peer = socket.create_connection(place, GREETING_SECONDS, (self.wanted["source"], 0))
        link = Link(peer)
        try:
            greeting = link.read(len(GREETING) + NONCE)
            nonce = secrets.token_bytes(NONCE)
            who = struct.pack(">HH", self.wanted["index"], stream)
            link.nonces = greeting[len(GREETING) :] + nonce
            peer.sendall(nonce + who + link.sign(b"receive" + who))
            if not hmac.compare_digest(link.read(PROOF), link.sign(b"send" + who)):
                raise EOFError
            peer.settimeout(None)
            return link
        except BaseException:
            peer.close()
            raise

    def get_manifest(self, control: Link) -> Manifest:
        """Take the manifest; raises RelayError if it is not what our sender signed."""
        frame = control.read_frame(MANIFEST_BYTES)
        proof, body = frame[:PROOF], frame[PROOF:]
        if not hmac.compare_digest(proof, control.sign(b"manifest" + body)):
            raise RelayError(
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
        buffer = memoryview(bytearray(BUFFER))
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
        file, digest = self.landing.part(incoming), hashlib.sha256()
        offset, size = incoming.entry.span(piece)
        end = offset + size
        while offset < end:
            view = buffer[: end - offset]
            link.fill(view)
            digest.update(view)
            while len(view):
                count = os.pwrite(file, view, offset)
                self.progress.add(count)
                offset, view = offset + count, view[count:]
        mark = link.read(1)
        if mark == CHANGED:
            raise RelayError(
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


def drop_tree(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """Role drop."""
    files = size = 0
    for name, _, info in walk(os.fsencode(wanted["root"]), (), ()):
        if stat.S_ISREG(info.st_mode):
            path = os.path.join(os.fsencode(wanted["root"]), name)
            with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as file:
                drop(file)
            files, size = files + 1, size + info.st_size
    return {"files": files, "bytes": size}


def status(key: str) -> int:
    """A size from /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def disk_reads() -> int:
    """Bytes that this program had the disk read; 0 where the kernel does not count."""
    with contextlib.suppress(OSError), open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))
    return 0


ROLES: Dict[str, Callable[[Dict[str, Any]], Dict[str, Any]]] = {
    "manifest": make_manifest,
    "check": check,
    "send": lambda wanted: Sender(wanted).run(),
    "receive": lambda wanted: Receive(wanted).run(),
    "drop": drop_tree,
}


def main(wanted: Dict[str, Any]) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        if wanted["role"] in ("send", "receive") and not TOKEN:
            raise RelayError("this program was started without a token: see keyed()")
        found = ROLES[wanted["role"]](wanted)
    except (RelayError, OSError) as error:
        found = {"error": str(error)}
    if "error" in found:
        print(found["error"], file=sys.stderr, flush=True)
    found["cpu_seconds"] = round(time.process_time(), 3)
    found["peak_bytes"] = status("VmHWM")
    if wanted.get("result", True):
        say(json.dumps(found))
    return 1 if "error" in found else 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[2])))
