"""A directory at a receiver, and how it differs from a manifest."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import threading
import time
from typing import Any, Dict, Iterator, List, Set, Tuple

from cluster.remote.relay.manifest import (
    PART,
    Entry,
    Manifest,
    closing,
    hash_piece,
    in_parallel,
    manifest_path,
    raw,
    some,
    text,
)
from cluster.remote.wire import Progress, TransferError, why

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Tree:
    """A directory at a receiver; every path is walked name by name, and no link is followed."""

    def __init__(self, root: str) -> None:
        self.root = root
        try:
            self.file = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError("cannot open the directory %r: %s" % (root, why(error))) from None

    @contextlib.contextmanager
    def at(self, path: str, make: bool = False) -> Iterator[Tuple[int, bytes]]:
        """Give (directory, name) of a path; raises TransferError where something is in the way."""
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
                raise TransferError(
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
        except (FileNotFoundError, TransferError):
            return None

    def open(self, path: str, flags: int, make: bool = False) -> int:
        """Open a regular file."""
        with self.at(path, make) as (directory, name):
            flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            file = os.open(name, flags, 0o600, dir_fd=directory)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise TransferError("%r is no file: remove it" % os.path.join(self.root, path))
        return file

    def rename(self, old: str, new: str) -> None:
        """Rename within one directory."""
        with self.at(old) as (directory, name):
            last = raw(new).rpartition(b"/")[2]
            try:
                os.rename(name, last, src_dir_fd=directory, dst_dir_fd=directory)
            except IsADirectoryError:
                raise TransferError(
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
