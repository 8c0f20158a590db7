"""Prints, as one JSON object, what is on this host: image, containers, units, addresses, our files.

Argument (JSON): images [its names], containers [name], units [name], files [path], secret_files
[path], label, port, watchdog (path of its state), known_good (a directory), report (null, or
{matters, noise, ray}: also GPUs, the last failure of each container's unit, and, where ray is a
command, what Ray lacks). All that is slow runs at the same time: one round trip, 0.1 s.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Dict, List, Tuple, Union

Process = Union["subprocess.Popen[bytes]", OSError]

UNIT_PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,UnitFileState,NeedDaemonReload,NRestarts,Result,"
    "InvocationID,ActiveEnterTimestampMonotonic"
)
JOURNAL_LINES = 400
GPU_QUERY = "--query-gpu=index,name,memory.used,memory.total,utilization.gpu"
ENDED = re.compile(r"Scheduled restart job|Failed with result|repeated too quickly")
"""What systemd says once a unit has come to its end, wanted or not."""
HOW = re.compile(r"(?:Main|Control) process exited.*|Deactivated successfully|.*timed out.*")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


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


def names(folder: str) -> List[str]:
    """Names of the archives in a directory, the newest first."""
    try:
        found = os.listdir(folder)
    except OSError:
        return []
    return sorted((name for name in found if name.endswith(".tar")), reverse=True)


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


def message(entry: Dict[str, Any]) -> str:
    """The text of a journal entry; journalctl gives one with colours in it as a list of bytes."""
    text = entry.get("MESSAGE") or ""
    if isinstance(text, list):
        text = bytes(text).decode(errors="replace")
    return COLOUR.sub("", text).strip()


def last_failure(journal: bytes, matters: str, noise: str) -> Dict[str, Any] | None:
    """When and how a unit last ended by itself, and the last line before that says why.

    `journal` is journalctl -o json, oldest first. Returns {seconds_ago, how, reason}.
    """
    tells, says_nothing = re.compile(matters, re.IGNORECASE), re.compile(noise)
    failure, how, reason = None, "", ""
    for line in journal.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        text = message(entry)
        if entry.get("SYSLOG_IDENTIFIER") != "systemd":
            if tells.search(text) and not says_nothing.search(text):
                reason = text
            continue
        found = HOW.search(text)
        if found:
            how = found.group().rstrip(".")
        elif ENDED.search(text):
            ago = time.time() - int(entry.get("__REALTIME_TIMESTAMP", 0)) / 1e6
            failure = {"seconds_ago": round(ago), "how": how or text, "reason": reason[:400]}
        elif text.startswith("Starting "):
            how = reason = ""
    return failure


def report_of(wanted: Dict[str, Any], containers: List[str]) -> Callable[[], Dict[str, Any]]:
    """Begin to look at what only a report shows; what is returned gives it."""
    argv = ("journalctl", "-o", "json", "--no-pager", "-n", str(JOURNAL_LINES))
    journals = {name: start(*argv, "-u", name + ".service") for name in containers}
    gpus = start("nvidia-smi", GPU_QUERY, "--format=csv,noheader,nounits")
    ray = start(*wanted["ray"]) if wanted["ray"] else None

    def result() -> Dict[str, Any]:
        failures = {}
        for name, process in journals.items():
            failure = last_failure(finish(process)[0], wanted["matters"], wanted["noise"])
            if failure:
                failures[name] = failure
        lines = finish(gpus)[0].decode(errors="replace").splitlines()
        lacks = finish(ray, 60)[1] if ray else None
        return {
            "failures": failures,
            "gpus": [[field.strip() for field in line.split(",")] for line in lines],
            "ray": None if lacks is None else lacks.splitlines(),
        }

    return result


def content(found: Dict[str, Any]) -> str:
    """What identifies an image, whichever way Docker stores it: what a container of it would be."""
    config = found.get("Config") or {}
    keys = ("Env", "Entrypoint", "Cmd", "WorkingDir", "User")
    layers = (found.get("RootFS") or {}).get("Layers") or []
    rows = [layers, found.get("Os"), found.get("Architecture")]
    rows += [config.get(key) or None for key in keys]
    return "sha256:" + hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def main(wanted: Dict[str, Any]) -> None:
    image = start("docker", "image", "inspect", *wanted["images"])
    containers = start("docker", "container", "inspect", *wanted["containers"])
    units = start(
        "systemctl",
        "show",
        "--property=" + UNIT_PROPERTIES,
        *(name if "." in name else name + ".service" for name in wanted["units"]),
    )
    addresses = start("ip", "-o", "-4", "addr", "show")
    report = report_of(wanted["report"], wanted["containers"]) if wanted.get("report") else None
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
        "known_good": names(wanted["known_good"]),
        "watchdog": (read(wanted["watchdog"]) or b"").decode(errors="replace"),
    }
    for found in objects(image_out):
        digests = found.get("RepoDigests") or []
        state["image"] = {"id": found["Id"], "digests": digests, "content": content(found)}
    for found in objects(containers_out):
        state["containers"][found["Name"].lstrip("/")] = {
            "id": found["Id"],
            "image": found["Image"],
            "status": found["State"]["Status"],
            "definition": (found["Config"].get("Labels") or {}).get(wanted["label"]),
        }
    for block in units_out.decode(errors="replace").split("\n\n"):
        rows = dict(line.partition("=")[::2] for line in block.splitlines() if "=" in line)
        if rows.get("Id"):
            since = int(rows.pop("ActiveEnterTimestampMonotonic", "") or 0)
            rows["Uptime"] = "%d" % (time.monotonic() - since / 1e6) if since else ""
            state["units"][rows["Id"].partition(".service")[0]] = rows
    state["report"] = report() if report else None
    print(json.dumps(state))


if __name__ == "__main__":
    main(json.loads(sys.argv[2]))
