"""Role receive: listens on 127.0.0.1 and passes what Docker asks for on to the head."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from typing import Any, Dict, List

from cluster.remote.registry.loopback import accept, may_use, speaks_plainly
from cluster.remote.registry.pull import pull, stay
from cluster.remote.registry.source import ImageError
from cluster.remote.wire import (
    BUFFER,
    CONTROL,
    GREETING_SECONDS,
    Caller,
    Link,
    SilenceError,
    TransferError,
    hang_up,
    listen,
)

DATA = 0
"""The kind of a connection that carries one of Docker's."""


class Forwarder:
    """Listens on 127.0.0.1 and passes what comes from this host's Docker on to the head."""

    def __init__(self, wanted: Dict[str, Any]) -> None:
        self.wanted = wanted
        self.caller = Caller(wanted)
        self.stall = wanted.get("stall", 20)
        self.received = 0
        self.layers: Dict[str, int] = {}
        self.is_ready = False
        self.error: str | None = None
        self.news: Dict[str, Any] = {"state": "running"}
        self.has_last_word = threading.Event()
        self.conversation: threading.Thread | None = None
        self.lock = threading.Lock()
        self.open: List[socket.socket] = []
        self.port = 0

    def start(self) -> None:
        """Find the head, and listen; raises TransferError."""
        control = self.dial(CONTROL, self.wanted.get("patience", 60))
        control.limit(self.stall)
        server = listen("127.0.0.1", [0])
        self.open.append(server)
        self.port = int(server.getsockname()[1])
        threading.Thread(target=accept, args=(server, self.forward), daemon=True).start()
        self.conversation = threading.Thread(target=self.converse, args=(control,), daemon=True)
        self.conversation.start()

    def dial(self, kind: int, patience: float) -> Link:
        """Connect; raises TransferError when patience is over, or nobody reads us any more."""
        link = self.caller.call(kind, patience, is_over=is_stopped)
        self.open.append(link.peer)
        return link

    def converse(self, control: Link) -> None:
        """Exchange signs of life and news with the head until it has our last word."""
        sender = self.caller.sender
        try:
            while True:
                news = self.news
                control.write_frame(json.dumps(news).encode())
                answer = json.loads(control.read_frame())
                self.layers, self.is_ready = answer["layers"], answer["ready"]
                if answer["error"]:
                    self.error = self.error or "%s: %s" % (self.wanted["sender"], answer["error"])
                if news["state"] != "running":
                    break
                self.has_last_word.wait(0.25)
        except SilenceError:
            self.error = self.error or (
                "nothing came from %s for %d s: the link is cut, or the host is down; run it again "
                "when it is back" % (sender, self.stall)
            )
        except (OSError, EOFError, ValueError, KeyError):
            self.error = self.error or (
                "%s ended the connection: its program was stopped or died; run it again" % sender
            )

    def tell(self, state: str, reason: str) -> None:
        """Give the head our last word, if it still listens."""
        self.news = {"state": state, "reason": reason}
        self.has_last_word.set()
        if self.conversation is not None:
            self.conversation.join(GREETING_SECONDS)

    def forward(self, docker: socket.socket) -> None:
        """Join a connection of Docker with one to the head until either ends."""
        self.open.append(docker)
        if not may_use(docker) or not speaks_plainly(docker):
            return
        try:
            head = self.dial(DATA, 0)
        except TransferError:
            return
        with contextlib.suppress(OSError):
            self.join(docker, head)
        hang_up(docker)
        head.cut()

    def join(self, docker: socket.socket, head: Link) -> None:
        """Copy both ways, in one thread: TLS does not let two use a connection at once."""
        buffer = memoryview(bytearray(BUFFER))
        while True:
            waiting = (
                select.select([docker, head.peer], [], [])[0] if not head.pending else [head.peer]
            )
            for source in waiting:
                count = source.recv_into(buffer)
                if not count:
                    return
                if source is docker:
                    head.peer.sendall(buffer[:count])
                    continue
                docker.sendall(buffer[:count])
                with self.lock:
                    self.received += count

    def close(self) -> None:
        """Leave no socket behind."""
        for each in self.open:
            hang_up(each)


def is_stopped() -> bool:
    """Never true: stay() says it with its own reason."""
    stay()
    return False


def receive(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """Role receive."""
    forwarder = Forwarder(wanted)
    state, reason = "failed", "its program was stopped"
    try:
        forwarder.start()
        while not forwarder.is_ready and not forwarder.error:
            stay()
            time.sleep(0.05)
        if forwarder.error:
            raise ImageError(forwarder.error)
        image_id = pull(
            wanted,
            forwarder.port,
            lambda: forwarder.layers,
            lambda: forwarder.received,
            lambda: forwarder.error,
        )
        state, reason = "done", ""
    except TransferError as error:
        reason = str(error)
        raise
    finally:
        forwarder.tell(state, reason)
        forwarder.close()
    return {"digest": wanted["digest"], "id": image_id, "received": forwarder.received}
