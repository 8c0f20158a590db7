"""What a directory holds: its files with the sha256 of every piece, and its links."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import json
import os
import stat
import threading
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Sequence, Set, Tuple

from cluster.remote.wire import BUFFER, Progress, TransferError, why

PIECE = 16 << 20
"""Bytes that are hashed, asked for and sent again as one."""
PART = b".relay.part"
SHOWN_NAMES = 20


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
        """Take rows from outside; raise TransferError for what no honest sender would say."""
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
                raise TransferError("the manifest has an entry that leads out: %r" % entry.path)
        return cls(entries)

    @classmethod
    def load(cls, path: str) -> Manifest | None:
        """Read a saved one; None where there is none that can be used."""
        try:
            with open(path, encoding="utf-8") as file:
                return cls.parse(json.load(file)["entries"])
        except (OSError, ValueError, TypeError, KeyError, TransferError):
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
            raise TransferError("cannot write the manifest %s: %s" % (path, why(error))) from None


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
    """Yield (path, target of a link or None, stat) of everything; raises TransferError."""
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
            raise TransferError("cannot read %r: %s" % (text(full), why(error))) from None
        if not stat.S_ISREG(info.st_mode):
            raise TransferError(
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
        raise TransferError(
            "%r is a link to %r, which cannot be read (%s): an unfinished download? Complete it or "
            "remove the link" % (text(full), text(target), why(error))
        ) from None
    if end.startswith(home + b"/"):
        if not is_link_inside(path, target):
            target = os.path.relpath(end, os.path.dirname(full))
        return target, os.lstat(full)
    if stat.S_ISDIR(info.st_mode):
        raise TransferError(
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


def make_manifest(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """Role manifest."""
    began, path, root = time.monotonic(), manifest_path(wanted), os.fsencode(wanted["root"])
    if not os.path.isdir(root):
        raise TransferError("%r is no directory here" % wanted["root"])
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
            raise TransferError("cannot read %r: %s" % (text(name), why(error))) from None
        with closing(file):
            digest = hash_piece(file, offset, size)
            if digest is None:
                raise TransferError("%r became shorter while it was read" % text(name))
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
