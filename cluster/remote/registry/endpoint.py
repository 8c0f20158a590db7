"""Role serve: a read-only registry of one image, for this host's Docker and for the others."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import socket
import threading
import time
import urllib.parse
from typing import Any, Dict, List

from cluster.remote.registry.loopback import accept, may_use, speaks_plainly
from cluster.remote.registry.pull import pull, stay, wait_until
from cluster.remote.registry.source import INDEXES, Blob, ImageError, Source, clear, size_of
from cluster.remote.wire import (
    CONTROL,
    PROGRESS_SECONDS,
    Door,
    Link,
    hang_up,
    listen,
    say,
)

SEND_BYTES = 4 << 20
FAREWELL_SECONDS = 5
"""How long the head stays after a failure, so that every receiver hears the reason."""


class Receiver:
    """What the head knows of a host that gets the image."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.state, self.reason = "absent", "it did not come"
        self.is_connected = False
        self.sent = 0
        self.layers: Dict[str, int] = {}

    @property
    def is_over(self) -> bool:
        """Whether it needs nothing more."""
        return self.state in ("done", "failed")


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers a Docker engine: manifests and blobs of one image, nothing else."""

    protocol_version = "HTTP/1.1"
    endpoint: Endpoint
    receiver: Receiver
    link: Link

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer; what goes wrong is said in the words that Docker prints."""
        try:
            self.answer()
        except ImageError as error:
            self.refuse(error.status, str(error))
        except OSError:
            self.close_connection = True

    def answer(self) -> None:
        """Find out what is asked for."""
        source = self.endpoint.source
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        prefix = "/v2/%s/" % source.reference.repository
        kind, _, digest = path[len(prefix) :].partition("/")
        if path.rstrip("/") == "/v2":
            self.whole(b"{}", "application/json", "")
            return
        if path.startswith(prefix) and kind == "manifests":
            found = source.manifest(digest)
            if found is not None:
                if found[1] not in INDEXES and self.command == "GET":
                    self.receiver.layers = source.layers(digest)
                self.whole(*found, digest)
                return
        elif path.startswith(prefix) and kind == "blobs":
            blob = source.blob(digest)
            if blob is not None:
                self.part(blob)
                return
        self.refuse(404, "the head gives one image only, and this is not of it")

    def refuse(self, status: int, reason: str) -> None:
        """Send an error as registries do."""
        code = {401: "UNAUTHORIZED", 403: "DENIED", 429: "TOOMANYREQUESTS"}.get(status, "UNKNOWN")
        body = json.dumps({"errors": [{"code": code, "message": reason}]}).encode()
        self.whole(body, "application/json", "", status)

    def whole(self, body: bytes, kind: str, digest: str, status: int = 200) -> None:
        """Send something small."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        if digest:
            self.send_header("Docker-Content-Digest", digest)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def part(self, blob: Blob) -> None:
        """Send a blob, or the rest of one, while it comes."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        begin = int(asked.group(1)) if asked else 0
        end = min(blob.size, int(asked.group(2)) + 1 if asked and asked.group(2) else blob.size)
        if asked and begin >= end:
            self.refuse(416, "there is nothing behind byte %d" % begin)
            return
        if self.command != "HEAD":
            blob.wait(begin)  # before the status, which can still say what is wrong
        self.send_response(206 if asked else 200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Docker-Content-Digest", blob.digest)
        if asked:
            self.send_header("Content-Range", "bytes %d-%d/%d" % (begin, end - 1, blob.size))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.flush()
        while begin < end:
            try:
                ready = min(end, blob.wait(begin))
            except ImageError:
                self.close_connection = True  # Docker will ask again, and then hear the reason
                return
            count = min(SEND_BYTES, ready - begin)
            sent = self.link.write_file(blob.file, blob.start + begin, count)
            if sent == 0:
                raise ConnectionError("the file has become shorter")
            begin += sent
            self.receiver.sent += sent


class Endpoint:
    """The head's registry: listens, lets in who knows the token, and serves."""

    def __init__(self, wanted: Dict[str, Any], source: Source) -> None:
        self.source, self.stall = source, wanted.get("stall", 20)
        self.receivers = [Receiver(each["name"], each["address"]) for each in wanted["receivers"]]
        self.own = Receiver("the head", "127.0.0.1")
        self.is_ready = False
        self.is_over = False
        listener = listen(wanted["address"], wanted["ports"])
        self.door = Door(listener, [each.address for each in self.receivers])
        loopback = listen("127.0.0.1", [0])
        self.port = int(loopback.getsockname()[1])
        self.open: List[socket.socket] = [loopback]
        self.doorkeeper = threading.Thread(target=self.let_in, daemon=True)
        self.doorkeeper.start()
        threading.Thread(target=accept, args=(loopback, self.welcome_docker), daemon=True).start()

    def let_in(self) -> None:
        """Let in receivers until all is over; a thread serves each connection."""
        while not self.is_over:
            for link, index, kind in self.door.admit(0.1):
                receiver = self.receivers[index]
                threading.Thread(target=self.welcome, args=(link, receiver, kind)).start()
        self.door.close()

    def welcome(self, link: Link, receiver: Receiver, kind: int) -> None:
        """Serve a connection of a receiver, and close it."""
        try:
            link.encrypt(is_sender=True)
            self.open.append(link.peer)
            if kind == CONTROL:
                self.converse(link, receiver)
            else:
                self.serve(link, receiver)
        except OSError:
            pass  # the receiver has gone, or will say on its control connection what it lacks
        finally:
            link.peer.close()

    def welcome_docker(self, peer: socket.socket) -> None:
        """Serve this host's own Docker."""
        self.open.append(peer)
        if may_use(peer) and speaks_plainly(peer):
            self.serve(Link(peer), self.own)

    def serve(self, link: Link, receiver: Receiver) -> None:
        """Answer requests on a connection until it ends."""
        # Docker may unpack for a while and not read; who never reads again is cut off.
        link.limit(max(60, self.stall))
        keys = {"endpoint": self, "receiver": receiver, "link": link}
        handler = type("Bound", (Handler,), keys)
        with contextlib.suppress(OSError):
            handler(link.peer, link.peer.getpeername(), self)

    def converse(self, link: Link, receiver: Receiver) -> None:
        """Exchange signs of life and news with a receiver until it is over."""
        link.limit(self.stall)
        receiver.is_connected = True
        receiver.state, receiver.reason = "running", ""
        try:
            while not receiver.is_over:
                news = json.loads(link.read_frame())
                error = self.source.error
                answer = {
                    "ready": self.is_ready,
                    "layers": receiver.layers,
                    "error": str(error) if error else None,
                }
                link.write_frame(json.dumps(answer).encode())
                if news["state"] in ("done", "failed"):
                    receiver.state, receiver.reason = news["state"], news.get("reason") or ""
        except (OSError, EOFError, ValueError, KeyError):
            if not receiver.is_over:
                receiver.state, receiver.reason = "failed", "its connection ended or went silent"
        receiver.is_connected = False

    def close(self) -> None:
        """Leave no socket behind."""
        self.is_over = True
        for each in self.open:
            hang_up(each)
        self.doorkeeper.join()


def serve(wanted: Dict[str, Any], source: Source) -> Dict[str, Any]:
    """Serve `source` until every receiver is through. Raises TransferError."""
    patience, began = wanted.get("patience", 60), time.monotonic()
    endpoint = Endpoint(wanted, source)
    image_id, is_finished = None, False
    try:
        try:
            source.prepare(wanted["digest"])
            endpoint.is_ready = True
            if wanted.get("tag"):
                own = endpoint.own
                image_id = pull(
                    wanted,
                    endpoint.port,
                    lambda: own.layers,
                    lambda: own.sent,
                    lambda: source.error,
                )
        except ImageError as error:
            source.error = source.error or error
            wait_until(lambda: told(endpoint), min(FAREWELL_SECONDS, patience), tick=stay)
            raise
        attend(endpoint, began + patience)
        is_finished = all(each.state == "done" for each in endpoint.receivers)
    finally:
        endpoint.close()
        if is_finished:
            clear(source.cache)
    found = {
        "digest": wanted["digest"],
        "id": image_id,
        "downloaded": source.downloaded,
        "served": endpoint.own.sent + sum(each.sent for each in endpoint.receivers),
        "receivers": {
            each.name: {"state": each.state, "reason": each.reason} for each in endpoint.receivers
        },
        "kept": 0 if is_finished else size_of(source.cache),
    }
    if source.error:
        raise source.error
    return found


def told(endpoint: Endpoint) -> bool:
    """Whether every receiver has come and gone, so that it has heard what went wrong."""
    return all(each.is_over and not each.is_connected for each in endpoint.receivers)


def attend(endpoint: Endpoint, until: float) -> None:
    """Wait for the receivers, and say how far they are."""
    spoken, before = time.monotonic(), -1
    while True:
        stay()
        now = time.monotonic()
        waiting = [
            each
            for each in endpoint.receivers
            if not each.is_over and not (each.state == "absent" and now > until)
        ]
        if not waiting:
            return
        sent = sum(each.sent for each in waiting)
        if now - spoken >= PROGRESS_SECONDS and sent != before:
            spoken, before = now, sent
            parts = ["%s %.2f GB" % (each.name, each.sent / 1e9) for each in waiting]
            say("given over the fabric: " + ", ".join(parts))
        time.sleep(0.1)
