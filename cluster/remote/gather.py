"""Brings the ranks of vLLM's multi-node mode (executor mp) together before each start of the group.

A rank cannot rejoin a group: when one has died, all have to start anew, and vLLM does not see to
that. So the head gathers its workers before every start of its own rank, on the port where torch
will meet afterwards; a worker's rank that still runs then belongs to a group that is gone.

gather.py ROLE JSON. Argument: port, head (its fabric address), deadline (seconds), and for
  head: workers {fabric address: name}. Waits until all of them have joined, then lets them go.
  worker: source (its own fabric address). Waits for the head's word.
  watch: source, unit, container. Kills the container of an active unit if the head gathers.
Exit code 1 at the deadline.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import time
from typing import Any, Dict

GREETING = b"multinode-vllm gathers\n"
"""torch's store, which has the port later, says nothing until it is asked."""
JOIN, GO = b"join\n", b"go\n"
GREETING_SECONDS = 2


class Gathering:
    """The workers that have joined, as long as their connections stand."""

    def __init__(self, workers: Dict[str, str]) -> None:
        self.workers = workers
        self.joined: Dict[str, socket.socket] = {}

    def greet(self, peer: socket.socket, address: str) -> None:
        """Take a worker in; anyone else, and whoever only looks, is let go."""
        if address not in self.workers:
            peer.close()
            return
        try:
            peer.settimeout(GREETING_SECONDS)
            peer.sendall(GREETING)
            if peer.recv(len(JOIN)) != JOIN:
                raise OSError("it only looked")
        except OSError:
            peer.close()
            return
        former = self.joined.pop(address, None)
        if former is not None:
            former.close()
        self.joined[address] = peer

    def drop_the_gone(self) -> None:
        """Forget workers whose connection has ended meanwhile."""
        by_socket = {peer: address for address, peer in self.joined.items()}
        for peer in select.select(list(by_socket), [], [], 0)[0] if by_socket else []:
            peer.close()
            del self.joined[by_socket[peer]]

    def missing(self) -> str:
        """Who has not joined, in words; "" when all have."""
        absent = [address for address in self.workers if address not in self.joined]
        return ", ".join("%s (%s)" % (self.workers[address], address) for address in absent)

    def go(self) -> None:
        """Let all start."""
        for peer in self.joined.values():
            with contextlib.suppress(OSError):
                peer.sendall(GO)
            peer.close()


def head(wanted: Dict[str, Any]) -> int:
    end = time.monotonic() + wanted["deadline"]
    gathering = Gathering(wanted["workers"])
    told = None
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((wanted["head"], wanted["port"]))
        server.listen()
        server.settimeout(1)
        while time.monotonic() < end:
            missing = gathering.missing()
            if not missing:
                gathering.go()
                print("all ranks are here", flush=True)
                return 0
            if missing != told:
                print("waiting for the ranks of %s" % missing, flush=True)
                told = missing
            with contextlib.suppress(socket.timeout):
                peer, (address, _) = server.accept()
                gathering.greet(peer, address)
            gathering.drop_the_gone()
    print("no rank from %s within %d s" % (missing, wanted["deadline"]), file=sys.stderr)
    return 1


def call(wanted: Dict[str, Any]) -> socket.socket | None:
    """Return a connection to the gathering head, or None where it gathers nobody.

    Raises OSError where the head cannot be reached.
    """
    address = (wanted["head"], wanted["port"])
    peer = socket.create_connection(address, GREETING_SECONDS, (wanted["source"], 0))
    # A head that loses its power says nothing; the wait for its word must end all the same.
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    try:
        if peer.recv(len(GREETING)) == GREETING:
            return peer
    except socket.timeout:
        pass
    peer.close()
    return None


def join(wanted: Dict[str, Any], seconds: float) -> str | None:
    """Join and wait, `seconds` at most, for the word to start. Return None then, else why not."""
    place = "%s:%s" % (wanted["head"], wanted["port"])
    try:
        peer = call(wanted)
    except OSError as error:
        return "the head does not answer at %s: %s" % (place, error.strerror or error)
    if peer is None:
        return "a group without this rank still runs at %s; it has to end first" % place
    with peer:
        try:
            peer.sendall(JOIN)
            peer.settimeout(max(1, seconds))
            return None if peer.recv(len(GO)) == GO else "the head at %s has stopped" % place
        except OSError as error:
            return "the head at %s has gone: %s" % (place, error.strerror or error)


def worker(wanted: Dict[str, Any]) -> int:
    end = time.monotonic() + wanted["deadline"]
    told = None
    while time.monotonic() < end:
        why = join(wanted, end - time.monotonic())
        if why is None:
            return 0
        if why != told:
            print("waiting: %s" % why, flush=True)
            told = why
        time.sleep(0.5)
    print("not called within %d s: %s" % (wanted["deadline"], told), file=sys.stderr)
    return 1


def watch(wanted: Dict[str, Any]) -> int:
    active = subprocess.run(["systemctl", "is-active", "--quiet", wanted["unit"]]).returncode == 0
    if not active:
        return 0
    try:
        peer = call(wanted)
    except OSError:
        return 0  # the head is down; this rank can wait for it as well as a new one could
    if peer is None:
        return 0
    peer.close()
    # A level for systemd: this unit logs nothing that is less than a notice.
    print("<5>the head gathers a new group; this rank belongs to the former one", flush=True)
    return subprocess.run(["docker", "kill", wanted["container"]]).returncode


if __name__ == "__main__":
    sys.exit({"head": head, "worker": worker, "watch": watch}[sys.argv[1]](json.loads(sys.argv[2])))
