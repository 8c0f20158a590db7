"""Brings the ranks of vLLM's multi-node mode (executor mp) together before each start of the group.

A rank cannot rejoin a group: when one has died, all have to start anew, and vLLM does not see to
that. So the head gathers its workers before every start of its own rank, on the port where torch
will meet afterwards; a worker's rank that still runs then belongs to a group that is gone. And an
idle head does not notice that a worker's rank has died: its kernel does, which has lost the
connection of that rank to torch's store, and which the rank's successor calls at the same port.

gather.py ROLE JSON. Argument: port, head (its fabric address), and for
  head: workers {fabric address: name}, deadline (seconds). Waits until all of them have joined,
    then lets them go.
  worker: source (its own fabric address), calls_from [first port, last], deadline. Waits for the
    head's word.
  watch-head: workers, calls_from, unit, container, state (path of a JSON file). Kills the container
    of an active unit if a worker's rank has ended or waits to be gathered.
  watch-worker: source, unit, container. Kills the container of an active unit if the head gathers.
Exit code 1 at the deadline.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import pathlib
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Dict, List, Set, Tuple

GREETING = b"multinode-vllm gathers\n"
"""torch's store, which has the port later, says nothing until it is asked."""
JOIN, GO = b"join\n", b"go\n"
GREETING_SECONDS = 2
LASTING_SECONDS = 4
"""A connection that has stood so long is a rank's; a worker's watch has none of more than 2 s."""
LOOKS = 3
"""So many, a second apart, have to agree: a connection can slip through one reading of /proc."""
ESTABLISHED = "01"
"""A connection that stands, in /proc/net/tcp; both ends are there."""

Peer = Tuple[str, int]
"""The other end of a connection: IPv4 address, port."""


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


def call(wanted: Dict[str, Any], ports: Iterable[int] = (0,)) -> socket.socket:
    """Return a connection to the head, from the first of these ports that is free (0: any).

    Raises OSError where the head cannot be reached.
    """
    address = (wanted["head"], wanted["port"])
    for port in ports:
        try:
            peer = socket.create_connection(address, GREETING_SECONDS, (wanted["source"], port))
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    else:
        raise OSError(errno.EADDRINUSE, "none of the ports to call from is free")
    # A head that loses its power says nothing; the wait for its word must end all the same.
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return peer


def gathers(peer: socket.socket) -> bool:
    """Whether it is the gathering head that has been called, not the store of a running group."""
    try:
        return peer.recv(len(GREETING)) == GREETING
    except socket.timeout:
        return False


def join(wanted: Dict[str, Any], seconds: float, say: Callable[[str], None]) -> bool:
    """Join and wait, `seconds` at most, for the word to start; say why it has not come."""
    place = "%s:%s" % (wanted["head"], wanted["port"])
    first, last = wanted["calls_from"]
    trouble = "the head does not answer at %s"
    try:
        with call(wanted, range(first, last + 1)) as peer:
            is_gathering = gathers(peer)
            peer.settimeout(max(1, seconds))
            if is_gathering:
                trouble = "the head at %s has gone"
                peer.sendall(JOIN)
                if peer.recv(len(GO)) == GO:
                    return True
                say("the head at %s has stopped" % place)
            else:
                say("a group without this rank still runs at %s; it has to end first" % place)
                # As long as this connection stands, the head's watch knows of this rank. It ends
                # with the group.
                with contextlib.suppress(OSError):
                    peer.recv(1)
    except OSError as error:
        say("%s: %s" % (trouble % place, error.strerror or error))
    return False


def worker(wanted: Dict[str, Any]) -> int:
    end = time.monotonic() + wanted["deadline"]
    told = ""

    def say(why: str) -> None:
        nonlocal told
        if why != told:
            print("waiting: %s" % why, flush=True)
            told = why

    while time.monotonic() < end:
        if join(wanted, end - time.monotonic(), say):
            return 0
        time.sleep(0.5)
    print("not called within %d s: %s" % (wanted["deadline"], told), file=sys.stderr)
    return 1


def ipv4(digits: str) -> str:
    """An address as /proc/net/tcp and tcp6 have it, as text; an IPv4 one out of a mapped one.

    They have it in hexadecimal words of 32 bits, each in the byte order of this machine.
    """
    words = [int(digits[index : index + 8], 16) for index in range(0, len(digits), 8)]
    address = ipaddress.ip_address(struct.pack("=%dI" % len(words), *words))
    return str(getattr(address, "ipv4_mapped", None) or address)


def connected(port: int) -> Set[Peer]:
    """Who is connected to a port of this host, as far as its kernel knows; asks nobody.

    torch's store listens on IPv6 and takes IPv4 there, too.
    """
    peers = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = pathlib.Path(path).read_text().splitlines()[1:]
        except OSError:  # there is no IPv6
            continue
        for line in lines:
            local, remote, state = line.split()[1:4]
            if state == ESTABLISHED and int(local.rpartition(":")[2], 16) == port:
                address, _, peer_port = remote.partition(":")
                peers.add((ipv4(address), int(peer_port, 16)))
    return peers


class Group:
    """What the head's watch has seen of the ranks since the unit has been started."""

    def __init__(self, wanted: Dict[str, Any], memory: Dict[str, Any]) -> None:
        self.workers: Dict[str, str] = wanted["workers"]
        self.calls_from: List[int] = wanted["calls_from"]
        self.times: Dict[Peer, Tuple[float, float]] = {
            (address, port): (first, last)
            for address, port, first, last in memory.get("connections", [])
        }
        """When a connection was seen first and last, seconds of the monotonic clock."""

    def waits(self, peer: Peer) -> bool:
        """Whether this connection is that of a rank that waits to be gathered."""
        first, last = self.calls_from
        return first <= peer[1] <= last

    def look(self, peers: Set[Peer], now: float) -> None:
        """Take in who is connected now."""
        for peer in peers:
            if not self.waits(peer):
                self.times[peer] = (self.times.get(peer, (now, now))[0], now)
        kept = peers | self.ranks()
        self.times = {peer: times for peer, times in self.times.items() if peer in kept}

    def ranks(self) -> Set[Peer]:
        """The connections that ranks have, or had: one lasts as long as its rank."""
        return {
            peer for peer, (first, last) in self.times.items() if last - first >= LASTING_SECONDS
        }

    def lacks(self, peers: Set[Peer]) -> Dict[str, str]:
        """Which workers have no rank in the group any more: {name: why}."""
        found = {}
        for address, name in self.workers.items():
            own = {peer for peer in self.ranks() if peer[0] == address}
            if any(peer[0] == address and self.waits(peer) for peer in peers):
                found[name] = "waits to be gathered"
            elif own and not own & peers:
                found[name] = "has ended"
        return found

    def memory(self) -> Dict[str, Any]:
        """What the next look needs, for JSON."""
        return {"connections": [[*peer, *times] for peer, times in self.times.items()]}


def active(unit: str) -> str:
    """The invocation of an active unit, a new one after every start; "" where it is not active."""
    out = subprocess.run(
        ["systemctl", "show", "--property=ActiveState,InvocationID", unit], stdout=subprocess.PIPE
    ).stdout.decode()
    rows = dict(line.partition("=")[::2] for line in out.splitlines())
    return rows.get("InvocationID", "") if rows.get("ActiveState") == "active" else ""


def watch_head(wanted: Dict[str, Any]) -> int:
    invocation = active(wanted["unit"])
    if not invocation:
        return 0
    path = pathlib.Path(wanted["state"])
    try:
        memory = json.loads(path.read_text())
    except (OSError, ValueError):
        memory = {}
    group = Group(wanted, memory if memory.get("invocation") == invocation else {})
    peers = connected(wanted["port"])
    group.look(peers, time.monotonic())
    path.write_text(json.dumps(dict(group.memory(), invocation=invocation)))
    lacks = group.lacks(peers)
    for _ in range(LOOKS - 1):
        if not lacks:
            return 0
        time.sleep(1)
        again = group.lacks(connected(wanted["port"]))
        lacks = {name: why for name, why in again.items() if name in lacks}
    if not lacks or active(wanted["unit"]) != invocation:
        return 0
    who = ", ".join("the rank of %s %s" % row for row in lacks.items())
    return kill(wanted["container"], "%s; the group starts anew" % who)


def watch_worker(wanted: Dict[str, Any]) -> int:
    if not active(wanted["unit"]):
        return 0
    try:
        with call(wanted) as peer:
            if not gathers(peer):
                return 0
    except OSError:
        return 0  # the head is down; this rank can wait for it as well as a new one could
    why = "the head gathers a new group; this rank belongs to the former one"
    return kill(wanted["container"], why)


def kill(container: str, why: str) -> int:
    """End a rank; its unit starts it anew."""
    # A level for systemd: these units log nothing that is less than a notice.
    print("<5>%s" % why, flush=True)
    return subprocess.run(["docker", "kill", container]).returncode


ROLES = {"head": head, "worker": worker, "watch-head": watch_head, "watch-worker": watch_worker}

if __name__ == "__main__":
    sys.exit(ROLES[sys.argv[1]](json.loads(sys.argv[2])))
