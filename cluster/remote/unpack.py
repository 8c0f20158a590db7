"""Puts the content of a tar archive into a model's directory, each file in one step.

unpack.py ROLE JSON. Roles:

state   Keys: record. Result: archive (the identity of what was unpacked last; "" for nothing).
unpack  Keys: archive (its path here; .tar, or packed with what tar knows on this host), root,
        record (path of a small file that says what was unpacked), identity (of the archive, to go
        into it). The archive and what is made of it lie in root/.arriving, which goes at the end.
        Result: files, bytes, seconds.

The archive holds the directory of a model, or what is in it. Files of the root that it does not
have stay. What is damaged is removed, what stands in the way is named; another run begins anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, Iterator

from cluster.remote.wire import PROGRESS_SECONDS, Role, TransferError, run, say, why

CONFIGS = ("config.json", "params.json")
"""What vLLM looks for in a model's directory; the second is Mistral's own format."""
FULL = ("No space left on device", "Wrote only ")
"""What tar says of a full disk."""


def state(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """Role state."""
    try:
        with open(wanted["record"], encoding="utf-8") as file:
            return {"archive": str(json.load(file)["archive"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {"archive": ""}


def unpack(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """Role unpack; raises TransferError."""
    root, archive = wanted["root"], wanted["archive"]
    arriving = os.path.join(root, ".arriving")
    content = os.path.join(arriving, "content")
    try:
        shutil.rmtree(content, ignore_errors=True)
        os.makedirs(content)
        untar(archive, content)
        home = home_of(content)
        found = {"files": 0, "bytes": 0}
        for path in files(home):
            target = os.path.join(root, os.path.relpath(path, home))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            info = os.lstat(path)
            os.replace(path, target)
            found = {"files": found["files"] + 1, "bytes": found["bytes"] + info.st_size}
        remember(wanted["record"], wanted["identity"])
    except OSError as error:
        raise TransferError(
            "cannot unpack to %s: %s: %s" % (root, why(error), error.filename2 or error.filename)
        ) from None
    shutil.rmtree(arriving)
    return found


def untar(archive: str, content: str) -> None:
    """Have tar unpack; raises TransferError with what it complains of."""
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            # Not the owners of another machine, and never a path that leads out: tar's default.
            ("tar", "--extract", "--no-same-owner", "--file", archive, "--directory", content),
            stderr=complaints,
            env={**os.environ, "LC_ALL": "C"},
        )
        spoken = time.monotonic()
        while process.poll() is None:
            if time.monotonic() - spoken >= PROGRESS_SECONDS:
                spoken = time.monotonic()
                say("unpacking: %.2f GB" % (sum(map(os.path.getsize, files(content))) / 1e9))
            time.sleep(0.1)
        complaints.seek(0)
        said = complaints.read().decode(errors="replace").splitlines()
    if process.returncode == 0 and not has_its_end(archive):
        process.returncode, said = 2, ["its end is missing"]
    if process.returncode:
        shutil.rmtree(content, ignore_errors=True)
        reason = said[0] if said else "tar was killed"
        if any(sign in line for line in said for sign in FULL):
            raise TransferError(
                "the disk became full while unpacking to %s: it needs room for the archive and for "
                "what is in it; tasks/prune.py shows old models and images" % content
            )
        os.unlink(archive)
        raise TransferError(
            "the archive is damaged, not complete, or packed with what this host lacks: %s. Make "
            "it anew: tar -cf FILE -C DIRECTORY_OF_THE_MODEL ." % reason
        )


def has_its_end(archive: str) -> bool:
    """Whether a tar archive ends as it must; tar itself takes any end between two files for one."""
    with open(archive, "rb") as file:
        if file.read(512)[257:262] != b"ustar":
            return True  # it is packed: what unpacks it would have complained
        file.seek(max(0, os.fstat(file.fileno()).st_size - 1024))
        return not file.read().strip(b"\0")


def home_of(content: str) -> str:
    """The directory that is the model: all, or the one directory that holds all."""
    names = os.listdir(content)
    for home in (content, *(os.path.join(content, name) for name in names[:1] if len(names) == 1)):
        if any(os.path.isfile(os.path.join(home, name)) for name in CONFIGS):
            return home
    shutil.rmtree(os.path.dirname(content))
    raise TransferError(
        "the archive has no config.json at its top, nor in the one directory that is there: it is "
        "no model for vLLM. At its top: %s. Of a hub's cache take a snapshot, links followed: "
        "tar -chf FILE -C snapshots/COMMIT ." % (", ".join(sorted(names)[:5]) or "nothing")
    )


def files(directory: str) -> Iterator[str]:
    """Paths of everything below that is no directory, also of what comes and goes meanwhile."""
    for folder, folders, names in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in (*names, *links):
            path = os.path.join(folder, name)
            if os.path.lexists(path):
                yield path


def remember(record: str, identity: str) -> None:
    os.sync()
    os.makedirs(os.path.dirname(record), exist_ok=True)
    with open(record + ".new", "w", encoding="utf-8") as file:
        json.dump({"archive": identity}, file)
    os.replace(record + ".new", record)


ROLES: Dict[str, Role] = {"state": state, "unpack": unpack}

if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(run(ROLES, (), json.loads(sys.argv[2])))
