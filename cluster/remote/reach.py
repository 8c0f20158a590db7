"""Waits until this host reaches Ray's GCS over the fabric; says why when it does not.

Argument (JSON): address, port, deadline (seconds), source (our own fabric address), tell (print
why it waits; for a unit's journal).
The GCS speaks gRPC, so it answers HTTP/2: an open port of another program does not count.
"""

from __future__ import annotations

import errno
import json
import socket
import sys
import time
from typing import Any, Dict

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
SETTINGS_FRAME = 4


def ask(address: str, port: int, source: str, timeout: float) -> str | None:
    """Return None when a gRPC server answers, else why not."""
    try:
        peer = socket.create_connection((address, port), timeout, (source, 0))
    except OSError as error:
        return reason(error, source)
    with peer:
        try:
            peer.settimeout(timeout)
            peer.sendall(PREFACE)
            answer = peer.recv(9)
        except OSError as error:
            return "connected, then no answer: %s" % (error.strerror or error)
    if len(answer) >= 4 and answer[3] == SETTINGS_FRAME:
        return None
    return "the port is open, but what listens there is not Ray (it answers %r)" % answer[:9]


def reason(error: OSError, source: str) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return "this host has no address %s: check its fabric address and interface" % source
    if error.errno == errno.ECONNREFUSED:
        return "connection refused: nothing listens there"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "no route: is the cable in, and is %s on the same subnet?" % source
    if isinstance(error, socket.timeout):
        return "no answer at all: a firewall, or the wrong network"
    return error.strerror or str(error)


def main(wanted: Dict[str, Any]) -> int:
    end = time.monotonic() + wanted["deadline"]
    told = None
    while True:
        why = ask(wanted["address"], wanted["port"], wanted["source"], 2)
        if why is None:
            return 0
        if time.monotonic() >= end:
            break
        if why != told and wanted.get("tell"):
            print("waiting for Ray's head %s:%s: %s" % (wanted["address"], wanted["port"], why))
            sys.stdout.flush()
            told = why
        time.sleep(0.5)
    sys.stderr.write(
        "Ray's head %s:%s cannot be reached from %s: %s\n"
        % (wanted["address"], wanted["port"], wanted["source"], why)
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[2])))
