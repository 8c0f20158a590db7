"""What the programs share that bring data from one host to others over the fabric.

A sender listens on its fabric address, receivers call it. Both prove with HMAC that they know the
token of the run, which never crosses the wire; who does not know it gets nothing. Where the run has
a certificate, every connection is TLS after that: one certificate, made for this run alone, which
either side shows and neither takes any other. So who stands in between can read nothing either.

SECRETS is filled in the text that a host gets, never on a command line: cluster/programs.py.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hmac
import json
import os
import secrets
import selectors
import socket
import ssl
import struct
import sys
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Tuple

SECRETS: Dict[str, str] = {}
"""token: what all hosts of the run know. certificate (PEM, its key too): encrypt with it."""

GREETING = b"MULTINODE 1\n"
NONCE, PROOF = 16, 32
ANSWER = struct.Struct(">16sHH32s")
CONTROL = 0xFFFF
"""The kind of a receiver's first connection: signs of life, and news of both sides."""
GREETING_SECONDS = 5
STRANGERS = 32
"""Connections that may be open without having shown the token."""
NO_ADDRESS = "this host has no address %s: check its fabric address and interface"
PROGRESS_SECONDS = 2
BUFFER = 256 << 10
"""Bytes that one thread has in memory: a core's own cache holds them until they are written."""


class TransferError(Exception):
    """What goes wrong, for a person: what, where, why, what to do."""


class SilenceError(OSError):
    """Nothing came, or nothing could be sent, for the time that limit() allows."""


def say(line: str) -> None:
    print(line, flush=True)


def why(error: OSError) -> str:
    return error.strerror or str(error)


def hang_up(peer: socket.socket) -> None:
    """End a connection or a listener that another thread may be using."""
    with contextlib.suppress(OSError):
        # TLS's own shutdown would forget its state, and the other thread read on without it.
        socket.socket.shutdown(peer, socket.SHUT_RDWR)


@functools.cache
def tls(is_sender: bool) -> ssl.SSLContext:
    """TLS 1.3 in which either side has the run's certificate, and accepts no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_sender else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if is_sender:
        context.num_tickets = 0
    context.load_verify_locations(cadata=SECRETS["certificate"])
    # Python loads a key from a file only; this one is in no file system.
    file = os.memfd_create("certificate")
    with open(file, "w", encoding="ascii") as memory:
        memory.write(SECRETS["certificate"])
        memory.flush()
        context.load_cert_chain("/proc/self/fd/%d" % file)
    return context


class Link:
    """One connection. Blocking, and without a time limit until limit() sets one."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.nonces = b""
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def is_encrypted(self) -> bool:
        """Whether TLS is under it."""
        return isinstance(self.peer, ssl.SSLSocket)

    @property
    def pending(self) -> int:
        """Bytes that were read with others and that select() does not see."""
        return self.peer.pending() if isinstance(self.peer, ssl.SSLSocket) else 0

    def encrypt(self, is_sender: bool) -> None:
        """Begin TLS where the run wants it; raises OSError."""
        if "certificate" in SECRETS:
            self.peer.settimeout(GREETING_SECONDS)
            self.peer = tls(is_sender).wrap_socket(self.peer, server_side=is_sender)
            self.peer.settimeout(None)

    def limit(self, seconds: float) -> None:
        """Have reads and writes raise SilenceError after so long without a byte.

        Without TLS it is the kernel's, which sendfile knows too: one of Python's would make the
        socket non-blocking. Python's TLS, in turn, begins anew after the kernel's.
        """
        if self.is_encrypted:
            self.peer.settimeout(seconds)
            return
        packed = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
        self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)

    def fill(self, view: memoryview) -> None:
        """Read exactly as much; EOFError when the other side has gone."""
        flags = 0 if self.is_encrypted else socket.MSG_WAITALL
        while len(view):
            with silence():
                count = self.peer.recv_into(view, len(view), flags)
            if count == 0:
                raise EOFError
            view = view[count:]

    def read(self, count: int) -> bytes:
        """Read exactly as much; EOFError when the other side has gone."""
        data = bytearray(count)
        self.fill(memoryview(data))
        return bytes(data)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it."""
        with silence():
            self.peer.sendall(data)

    def write_file(self, file: int, offset: int, count: int) -> int:
        """Send a part of a file; return how many bytes of it, 0 at its end."""
        with silence():
            if not self.is_encrypted:
                return os.sendfile(self.peer.fileno(), file, offset, count)
            data = os.pread(file, min(count, BUFFER), offset)
            self.peer.sendall(data)
            return len(data)

    def read_frame(self, limit: int = 1 << 20) -> bytes:
        """Read what write_frame has sent."""
        (size,) = struct.unpack(">I", self.read(4))
        if size > limit:
            raise EOFError
        return self.read(size)

    def write_frame(self, data: bytes) -> None:
        """Send bytes with their length before them."""
        self.write(struct.pack(">I", len(data)) + data)

    def sign(self, what: bytes) -> bytes:
        """Prove to the other side of this connection that we know the token and say this."""
        return hmac.new(SECRETS["token"].encode(), self.nonces + what, "sha256").digest()

    def cut(self) -> None:
        """End it, whoever waits for it."""
        hang_up(self.peer)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Give the end of the kernel's time limit its one name."""
    try:
        yield
    except (BlockingIOError, socket.timeout):
        raise SilenceError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None


def listen(address: str, ports: List[int]) -> socket.socket:
    """Listen on the first port that is free; raises TransferError."""
    for port in ports:
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRNOTAVAIL:
                raise TransferError(NO_ADDRESS % address) from None
            if error.errno != errno.EADDRINUSE:
                raise TransferError("cannot listen on %s: %s" % (address, why(error))) from None
    raise TransferError(
        "on %s every port of %s is taken: is another transfer running?" % (address, ports)
    )


class Stranger:
    """A connection that has not shown the token."""

    def __init__(self, peer: socket.socket, address: str) -> None:
        self.link = Link(peer)
        self.address = address
        self.until = time.monotonic() + GREETING_SECONDS
        self.heard = b""


class Door:
    """Lets in who knows the token, whatever others try: few bytes, few seconds, few at a time.

    addresses: of the receivers; each may come from its own only.
    """

    def __init__(self, listener: socket.socket, addresses: List[str]) -> None:
        self.listener, self.addresses = listener, addresses
        self.strangers: Dict[socket.socket, Stranger] = {}
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)

    def admit(self, seconds: float) -> Iterator[Tuple[Link, int, int]]:
        """Wait, and give (connection, number of the receiver, kind) of everyone who comes in.

        The connection has to be encrypted by whoever serves it: that takes a receiver's time.
        """
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
            nonce, index, kind, proof = ANSWER.unpack(stranger.heard)
            link.nonces += nonce
            who = stranger.heard[NONCE:-PROOF]
            if hmac.compare_digest(proof, link.sign(b"receive" + who)) and (
                index < len(self.addresses) and self.addresses[index] == stranger.address
            ):
                self.forget(stranger)
                link.peer.setblocking(True)
                link.write(link.sign(b"send" + who))
                return link, index, kind
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


class Caller:
    """Calls the sender. Keys of `wanted`: address, ports, sender; source, index (ours)."""

    def __init__(self, wanted: Dict[str, Any]) -> None:
        self.wanted = wanted
        self.sender = "%s at %s" % (wanted["sender"], wanted["address"])
        self.port = 0
        """The one that our sender listens on, once it is known."""

    def call(self, kind: int, patience: float, is_over: Callable[[], bool]) -> Link:
        """Connect, and prove each other; raises TransferError after `patience` seconds."""
        until, source = time.monotonic() + patience, self.wanted["source"]
        while True:
            reasons = []
            for port in [self.port] if self.port else self.wanted["ports"]:
                try:
                    link = self.try_port(port, kind)
                except EOFError:
                    reasons.append("port %d: what listens there does not let us in" % port)
                except OSError as error:
                    if error.errno == errno.EADDRNOTAVAIL:
                        raise TransferError(NO_ADDRESS % source) from None
                    reasons.append("port %d: %s" % (port, why(error)))
                else:
                    self.port = port
                    return link
            if time.monotonic() > until or is_over():
                raise TransferError(
                    "cannot reach the sender %s from %s: %s"
                    % (self.sender, source, "; ".join(reasons))
                )
            time.sleep(0.1)

    def try_port(self, port: int, kind: int) -> Link:
        """Connect; raises EOFError when it is not our sender that listens there."""
        place = (self.wanted["address"], port)
        peer = socket.create_connection(place, GREETING_SECONDS, (self.wanted["source"], 0))
        link = Link(peer)
        try:
            greeting = link.read(len(GREETING) + NONCE)
            nonce = secrets.token_bytes(NONCE)
            who = struct.pack(">HH", self.wanted["index"], kind)
            link.nonces = greeting[len(GREETING) :] + nonce
            link.write(nonce + who + link.sign(b"receive" + who))
            if not hmac.compare_digest(link.read(PROOF), link.sign(b"send" + who)):
                raise EOFError
            peer.settimeout(None)
            link.encrypt(is_sender=False)
            return link
        except BaseException:
            link.peer.close()
            raise


def how_far(what: str, done: int, total: int, seconds: float) -> str:
    """A line for people: bytes, rate, time left."""
    rate = done / seconds
    left = "%d s left" % ((total - done) / rate) if rate else "waiting"
    return "%s: %.2f of %.2f GB, %.3f GB/s, %s" % (what, done / 1e9, total / 1e9, rate / 1e9, left)


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
        if now - self.spoken >= PROGRESS_SECONDS:
            self.spoken = now
            say(how_far(self.what, self.done, self.total, now - self.began))


def status(key: str) -> int:
    """A size from /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


Role = Callable[[Dict[str, Any]], Dict[str, Any]]


def run(roles: Dict[str, Role], secret: Tuple[str, ...], wanted: Dict[str, Any]) -> int:
    """Run a role and print its result as the last line; return the exit code.

    secret: the roles that talk to other hosts
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    began = time.monotonic()
    try:
        if wanted["role"] in secret and not SECRETS.get("token"):
            raise TransferError("this program was started without a token: see cluster/programs.py")
        found = roles[wanted["role"]](wanted)
    except (TransferError, OSError) as error:
        found = {"error": str(error)}
    if "error" in found:
        print(found["error"], file=sys.stderr, flush=True)
    found.setdefault("seconds", round(time.monotonic() - began, 3))
    found["cpu_seconds"] = round(time.process_time(), 3)
    found["peak_bytes"] = status("VmHWM")
    if wanted.get("result", True):
        try:
            say(json.dumps(found))
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains once more at its end
    return 1 if "error" in found else 0
