"""Programs of cluster/remote, started as a deployment does it, and networks between them."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.programs import keyed, source

HEAD = "127.0.0.1"
MIB = 1 << 20
SECRETS = {"token": "0123abc"}


@dataclass
class Ended:
    """How a program ended."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        """The last line."""
        return dict(json.loads(self.out.splitlines()[-1]))


def start(
    program: str,
    wanted: dict[str, Any],
    secrets: Mapping[str, str] | None = None,
    env: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start a role: the text, with the secrets in it, over stdin. prefix: words before it."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-", program, json.dumps(wanted)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    assert process.stdin is not None
    process.stdin.write(keyed(source(program), secrets) if secrets else source(program))
    process.stdin.close()
    process.stdin = None
    return process


def end(process: subprocess.Popen[str], seconds: float = 40) -> Ended:
    out, err = process.communicate(timeout=seconds)
    return Ended(process.returncode, out, err)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HEAD, 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], bool], seconds: float = 15) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


class Proxy:
    """Stands between a receiver and the sender, and does to the bytes what networks do."""

    def __init__(self, to: int, address: str = "127.0.0.2", rate: float = 0) -> None:
        self.to, self.address, self.rate = to, address, rate
        self.passed = 0
        self.is_frozen = False
        self.spoil: Callable[[bytearray], None] | None = None
        self.overhear: Callable[[bytes], None] = lambda data: None
        self.listener = socket.create_server((HEAD, 0))
        self.port = int(self.listener.getsockname()[1])
        self.sockets: list[socket.socket] = [self.listener]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                try:
                    server = socket.create_connection((HEAD, self.to), 5, (self.address, 0))
                except OSError:
                    client.close()
                    continue
                self.sockets += [client, server]
                for pair in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self.pump, args=pair, daemon=True).start()

    def pump(self, source: socket.socket, sink: socket.socket, is_down: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(64 << 10):
                while self.is_frozen:
                    time.sleep(0.05)
                self.overhear(data)
                # Small chunks are the conversation; its faults are another test.
                if is_down and len(data) > 16 << 10:
                    self.passed += len(data)
                    if self.rate:
                        time.sleep(len(data) / self.rate)
                    if self.spoil:
                        changed = bytearray(data)
                        self.spoil(changed)
                        data = bytes(changed)
                sink.sendall(data)
        while self.is_frozen:  # a link that is cut does not tell that the other side has ended
            time.sleep(0.05)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.is_frozen = False
        for each in self.sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextlib.contextmanager
def proxy(to: int, **keys: Any) -> Iterator[Proxy]:
    made = Proxy(to, **keys)
    try:
        yield made
    finally:
        made.close()
