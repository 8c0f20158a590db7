"""Connections on 127.0.0.1, where Docker accepts plain http without any configuration."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from typing import Callable

from cluster.remote.wire import BUFFER

TLS_HANDSHAKE = b"\x16"
"""The first byte of a TLS connection (RFC 8446, 5.1)."""


def accept(server: socket.socket, greet: Callable[[socket.socket], None]) -> None:
    """Take connections until the listener is closed, each in a thread that closes it."""

    def run(peer: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError):
                greet(peer)
        finally:
            peer.close()

    while True:
        try:
            peer, _ = server.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                time.sleep(0.05)
                continue
            return  # closed
        threading.Thread(target=run, args=(peer,), daemon=True).start()


def may_use(peer: socket.socket) -> bool:
    """Whether the other end of a loopback connection belongs to root (Docker) or to our own user.

    Every user of a host can connect to its 127.0.0.1; not all may see a private image.
    """
    try:
        (_, own), (_, other) = peer.getsockname(), peer.getpeername()
        with open("/proc/net/tcp") as file:
            rows = [line.split() for line in file]
    except OSError:
        return False
    loopback = "0100007F:%04X"
    for row in rows[1:]:
        if row[1] == loopback % other and row[2] == loopback % own:
            return int(row[7]) in (0, os.getuid())
    return False


def speaks_plainly(peer: socket.socket) -> bool:
    """Whether a connection of Docker's is plain http; if not, it is told to make it so.

    With containerd's image store Docker tries TLS first, also with a registry of which it knows
    that it need not have it, and goes back to http if it is answered with "HTTP/": moby's
    daemon/containerd/resolver.go, httpFallback.
    """
    if peer.recv(1, socket.MSG_PEEK) != TLS_HANDSHAKE:
        return True
    peer.recv(BUFFER)
    peer.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    peer.shutdown(socket.SHUT_WR)
    while peer.recv(BUFFER):  # what is left unread would take the answer with it
        pass
    return False
