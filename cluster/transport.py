"""pyinfra's ssh connections: prompt, given up when a host is silent, and through another host.

A host that only another host of the cluster can reach is reached by a channel of the connection
that is there already. pyinfra's ProxyJump opens one more connection to the jump host for every
host behind it: sshd drops them at random beyond ten at a time (MaxStartups), its host keys are
checked by other rules, and Nagle's algorithm delays every command by 40 ms. A channel has none of
this.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import paramiko
from pyinfra import inventory, logger, state
from pyinfra.api import Host

ASK_SECONDS = 15
"""Between two requests for a sign of life."""
SILENCE_SECONDS = 45
"""How long a host may take for one; more than a machine that swaps needs."""
_connecting = threading.Lock()  # gevent has patched it: it stops one greenlet, not all


class Transports:
    """Makes paramiko's transports to one host."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, sock: Any, **options: Any) -> paramiko.Transport:
        """Return a transport over `sock`: a TCP socket, or a channel through another host."""
        if isinstance(sock, socket.socket):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Transport(self.name, sock, **options)

    def to_json(self) -> str:
        """For pyinfra's debug-inventory."""
        return f"TCP_NODELAY, silent for at most {ASK_SECONDS + SILENCE_SECONDS} s"


class Transport(paramiko.Transport):
    """Closes itself when its host gives no sign of life: pyinfra alone would wait for ever.

    A host that loses its power, or a cut link, sends nothing that would end a connection.
    """

    def __init__(self, name: str, sock: Any, **options: Any) -> None:
        self.name_of_host = name
        self.is_watched = False
        super().__init__(sock, **options)

    def open_session(self, *args: Any, **options: Any) -> paramiko.Channel:
        """Open a channel for a command; the first one begins the watch."""
        if not self.is_watched:
            self.is_watched = True
            threading.Thread(target=self._watch, daemon=True).start()
        return super().open_session(*args, **options)

    def _watch(self) -> None:
        while True:
            time.sleep(ASK_SECONDS)
            if not self.is_active():
                return
            # sshd answers whatever it is asked; paramiko's own keepalive does not wait for that.
            asked = threading.Thread(
                target=self.global_request, args=("keepalive@openssh.com",), daemon=True
            )
            asked.start()
            asked.join(SILENCE_SECONDS)
            if asked.is_alive() and self.is_active():
                logger.error(
                    f"[{self.name_of_host}] no sign of life for {SILENCE_SECONDS} s: the host is "
                    "down, or the link to it is cut. The same command again goes on from what is "
                    "there."
                )
                self.close()
                return


class Channel:
    """What paramiko takes for a socket: a channel to ADDRESS:PORT through host `via`.

    It opens on first use, when pyinfra connects; raises OSError where `via` cannot be reached.
    """

    def __init__(self, via: str, address: str, port: int) -> None:
        self.via, self.address, self.port = via, address, port
        self._opened: paramiko.Channel | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._opened is None:
            self._opened = self._open()
        return getattr(self._opened, name)

    def __copy__(self) -> Channel:
        return self

    def to_json(self) -> str:
        """For pyinfra's debug-inventory."""
        return f"{self.address}:{self.port} through {self.via}"

    def _open(self) -> paramiko.Channel:
        transport = _connected(self.via).connector.client.get_transport()  # type: ignore[attr-defined]
        timeout = state.config.CONNECT_TIMEOUT
        try:
            channel: paramiko.Channel = transport.open_channel(
                "direct-tcpip", (self.address, self.port), ("127.0.0.1", 0), timeout=timeout
            )
        except paramiko.SSHException as error:
            raise OSError(f"{self.via} cannot reach {self.address}:{self.port}: {error}") from None
        return channel


def _connected(name: str) -> Host:
    """The jump host, once pyinfra has connected it; connected here where --limit leaves it out."""
    host: Host = inventory.get_host(name)
    if not state.is_host_in_limit(host):
        with _connecting:
            if not host.connected:
                host.connect(reason="as a jump host", raise_exceptions=True)
        return host
    end = time.monotonic() + state.config.CONNECT_TIMEOUT
    while not host.connected:
        if time.monotonic() > end:
            raise OSError(f"the way leads through {name}, which is not connected")
        time.sleep(0.01)
    return host
