"""Prints, as one JSON object, what is on this host: image, containers, units, addresses, our files.

Argument (JSON): image, containers [name], units [name], files [path], secret_files [path],
label, port, watchdog (path of its state). Everything slow runs at the same time: one round trip, a
tenth of a second.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import socket
import subprocess
import sys
from typing import Any, Dict, List, Tuple, Union

Process = Union["subprocess.Popen[bytes]", OSError]

UNIT_PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,UnitFileState,NeedDaemonReload,NRestarts,Result,"
    "ExecMainStartTimestamp,InvocationID"
)


def start(*argv: str) -> Process:
    try:
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        return error


def finish(process: Process, timeout: float = 20) -> Tuple[bytes, str]:
    """Return (output, complaint) of what start() began."""
    if isinstance(process, OSError):
        return b"", "%s: %s" % (process.filename, process.strerror)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        return b"", "no answer within %d s" % timeout
    return out, err.decode(errors="replace").strip() if process.returncode else ""


def objects(out: bytes) -> List[Dict[str, Any]]:
    try:
        return list(json.loads(out or b"[]"))
    except ValueError:
        return []


def docker_complaint(image_error: str, container_error: str) -> str | None:
    for error in (image_error, container_error):
        if error and "No such" not in error:
            return error.splitlines()[-1]
    return None


def read(path: str) -> bytes | None:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError:
        return None


def listening(port: int | None) -> bool:
    if not port:
        return False
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def interfaces(text: str) -> Dict[str, List[str]]:
    """Parse `ip -o -4 addr show`: 2: eth0    inet 10.0.0.2/24 brd ..."""
    found: Dict[str, List[str]] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) > 3 and words[2] == "inet":
            found.setdefault(words[1].partition("@")[0], []).append(words[3].partition("/")[0])
    return found


def main(wanted: Dict[str, Any]) -> None:
    image = start("docker", "image", "inspect", wanted["image"])
    containers = start("docker", "container", "inspect", *wanted["containers"])
    units = start(
        "systemctl",
        "show",
        "--property=" + UNIT_PROPERTIES,
        *(name if "." in name else name + ".service" for name in wanted["units"]),
    )
    addresses = start("ip", "-o", "-4", "addr", "show")
    files = {path: read(path) for path in wanted["files"]}
    secrets = {path: read(path) for path in wanted["secret_files"]}
    image_out, image_error = finish(image)
    containers_out, containers_error = finish(containers)
    units_out, units_error = finish(units)
    addresses_out, _ = finish(addresses)
    state: Dict[str, Any] = {
        "addresses": interfaces(addresses_out.decode(errors="replace")),
        "docker_error": docker_complaint(image_error, containers_error),
        "systemd_error": units_error or None,
        "image": None,
        "containers": {},
        "units": {},
        "files": {
            path: None if data is None else data.decode(errors="replace")
            for path, data in files.items()
        },
        "secret_files": {
            path: None if data is None else hashlib.sha256(data).hexdigest()
            for path, data in secrets.items()
        },
        "listening": listening(wanted["port"]),
        "watchdog": (read(wanted["watchdog"]) or b"").decode(errors="replace"),
    }
    for found in objects(image_out):
        state["image"] = {"id": found["Id"], "digests": found.get("RepoDigests") or []}
    for found in objects(containers_out):
        state["containers"][found["Name"].lstrip("/")] = {
            "id": found["Id"],
            "image": found["Image"],
            "status": found["State"]["Status"],
            "started": found["State"]["StartedAt"],
            "definition": (found["Config"].get("Labels") or {}).get(wanted["label"]),
        }
    for block in units_out.decode(errors="replace").split("\n\n"):
        rows = dict(line.partition("=")[::2] for line in block.splitlines() if "=" in line)
        if rows.get("Id"):
            state["units"][rows["Id"].partition(".service")[0]] = rows
    print(json.dumps(state))


main(json.loads(sys.argv[2]))
