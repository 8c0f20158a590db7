"""Keeps the files of a deployment that ended in a completion, and brings them back.

known_good.py ROLE JSON. Argument: folder (of the archives), paths (every file that a deployment
may have written), and for
  keep: name (TIME-ID.tar), record (any JSON), keep (so many archives). Where an archive of that ID
        is there already, it only becomes the newest.
  list: nothing more. Prints {"archives": [record with "name"]}, the newest first.
  restore: name, units {path: unit}. Puts every file back as it was, and removes those that the
        deployment did not have; their units are disabled. Prints {"changed": [path]}.
Every archive and every file is written under another name first: never half of one.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from typing import Any, Dict, List

RECORD = "record.json"


def archives(folder: str) -> List[str]:
    """Names of the archives, the newest first."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted((name for name in names if name.endswith(".tar")), reverse=True)


def identity(name: str) -> str:
    return name.rpartition("-")[2]


def pack(path: str, paths: List[str], record: Dict[str, Any]) -> None:
    data = json.dumps(record).encode()
    fresh = path + ".new"
    # The archive holds secrets; it is closed to others before the first of them is written.
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as raw, tarfile.open(fileobj=raw, mode="w") as tar:
        member = tarfile.TarInfo(RECORD)
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
        for file in paths:
            if os.path.isfile(file):
                tar.add(file, arcname=file, recursive=False)
    os.replace(fresh, path)


def keep(wanted: Dict[str, Any]) -> None:
    folder, name = wanted["folder"], wanted["name"]
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, name)
    same = [each for each in archives(folder) if identity(each) == identity(name)]
    if same:
        os.replace(os.path.join(folder, same[0]), path)
    else:
        pack(path, wanted["paths"], wanted["record"])
    for each in [*archives(folder)[wanted["keep"] :], *same[1:]]:
        os.remove(os.path.join(folder, each))


def read(path: str) -> Dict[str, Any]:
    with tarfile.open(path) as tar:
        file = tar.extractfile(RECORD)
        assert file is not None
        return dict(json.load(file), name=os.path.basename(path))


def restore(wanted: Dict[str, Any]) -> List[str]:
    changed = []
    with tarfile.open(os.path.join(wanted["folder"], wanted["name"])) as tar:
        members = {"/" + member.name.lstrip("/"): member for member in tar.getmembers()}
        for path in wanted["paths"]:
            member = members.get(path)
            if member is None:
                if os.path.exists(path):
                    changed.append(path)
                continue
            file = tar.extractfile(member)
            assert file is not None
            if put(path, file.read(), member.mode):
                changed.append(path)
    gone = [path for path in changed if path not in members]
    for path in gone:
        if path in wanted["units"]:
            disable = ["systemctl", "disable", "--quiet", "--now", wanted["units"][path]]
            subprocess.run(disable, stdout=subprocess.DEVNULL)
        os.remove(path)
    if any(path in wanted["units"] for path in changed):
        subprocess.run(["systemctl", "daemon-reload"], check=True)
    return changed


def put(path: str, content: bytes, mode: int) -> bool:
    """Write a file in one step; return whether it was another before."""
    try:
        with open(path, "rb") as file:
            if file.read() == content:
                return False
    except OSError:
        pass
    fresh = path + ".new"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode & 0o777)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.chmod(fresh, mode & 0o777)
    os.replace(fresh, path)
    return True


def main(role: str, wanted: Dict[str, Any]) -> int:
    try:
        if role == "keep":
            keep(wanted)
        elif role == "list":
            folder = wanted["folder"]
            found = [read(os.path.join(folder, name)) for name in archives(folder)]
            print(json.dumps({"archives": found}))
        else:
            print(json.dumps({"changed": restore(wanted)}))
    except (OSError, tarfile.TarError, KeyError, ValueError) as error:
        sys.stderr.write("%s: %s\n" % (wanted["folder"], error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
