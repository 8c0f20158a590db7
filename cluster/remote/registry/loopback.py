"""Connections on 127.0.0.1, where Docker accepts plain http without any configuration."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from typing import Callable


def accept(server: socket.socket, greet: Callable[[socket.socket], None]) -> None:
    """Take connections until the listener is closed, each in a thread that closes it."""

    def run(peer: socket.socket) -> None:
        try:
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
