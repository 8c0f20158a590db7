"""A small server that speaks the Hugging Face hub's protocol, with the faults of a real way there.

What it answers was read in huggingface_hub 0.26 to 2.4 (hf_api.py, file_download.py): model info
with the sizes of files, their tree, and /resolve/ with X-Repo-Commit, X-Linked-Size, X-Linked-Etag
and a redirect of large files to a storage on another host (127.0.0.2).
"""

from __future__ import annotations

import hashlib
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Request:
    """One request as it came."""

    method: str
    path: str
    range: str | None
    token: str | None
    is_storage: bool


@dataclass
class Model:
    """A repository: branches and tags, and the files of each commit."""

    name: str
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    is_gated: bool = False
    is_private: bool = False
    readers: set[str] = field(default_factory=set)
    """Tokens that may read it."""

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Add a commit and move a branch to it."""
        seed = json.dumps([ref, len(self.commits), sorted(files)])
        name = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[name] = files
        self.refs[ref] = name
        return name


@dataclass
class Hub:
    """The server's state: what it has, what it was asked, what it does wrong."""

    models: dict[str, Model] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    """Tokens that exist; another one is answered with 401."""
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    storage: str = ""
    large: int = 1 << 20
    """Bytes from which on a file is in the storage (LFS)."""
    limited: int = 0
    """So many requests to come are answered with 429."""
    sizes: dict[str, int] = field(default_factory=dict)
    """What to say of the size of a file, instead of the truth."""
    breaks: dict[str, list[int]] = field(default_factory=dict)
    """Path: after so many bytes the connection breaks; one number per download."""
    stalls: dict[str, int] = field(default_factory=dict)
    """Path: after so many bytes nothing more comes, and the connection stays."""
    flipped: set[str] = field(default_factory=set)
    """Paths that arrive with a wrong byte, once."""
    failing: int = 0
    """So many downloads from the storage to come are answered with 503."""
    page: str | None = None
    """Answer everything with this HTML, as the login page of a proxy does."""

    def model(self, name: str, files: dict[str, bytes] | None = None, **kind: Any) -> Model:
        """Add a repository."""
        model = self.models[name] = Model(name, **kind)
        if files is not None:
            model.commit(files)
        return model

    def downloads(self, path: str) -> list[Request]:
        """The requests that asked for the content of a file."""
        return [each for each in self.requests if each.method == "GET" and each.path.endswith(path)]


def git_id(data: bytes) -> str:
    """The name of a small file in the cache."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    hub: Hub
    is_storage = False

    def do_HEAD(self) -> None:
        self.serve()

    def do_GET(self) -> None:
        self.serve()

    def serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").partition("Bearer ")[2] or None
        seen = Request(self.command, path, self.headers.get("Range"), token, self.is_storage)
        self.hub.requests.append(seen)
        if self.hub.page is not None:
            self.reply(200, self.hub.page.encode(), {"Content-Type": "text/html"})
        elif self.is_storage:
            self.store(path)
        elif self.hub.limited > 0:
            self.hub.limited -= 1
            self.refuse(429, "", "We had to rate limit you", {"RateLimit": '"api";r=0;t=0'})
        elif token is not None and token not in self.hub.tokens:
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif path.startswith("/api/models/"):
            self.api(path.removeprefix("/api/models/"), token)
        else:
            self.resolve(path.lstrip("/"), token)

    def find(self, name: str, revision: str, token: str | None) -> tuple[Model, str] | None:
        model = self.hub.models.get(name)
        if model is None or (model.is_private and token not in model.readers):
            # The real one does not tell a missing repository from one that is not for everybody.
            status = 401 if token is None else 404
            self.refuse(status, "RepoNotFound" if token else "", "Invalid username or password.")
            return None
        commit = model.refs.get(revision, revision)
        if commit not in model.commits:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return model, commit

    def api(self, rest: str, token: str | None) -> None:
        organisation, name, *more = rest.split("/")
        kind, revision = (more[0], "/".join(more[1:])) if more else ("revision", "main")
        found = self.find(f"{organisation}/{name}", revision, token)
        if found is None:
            return
        model, commit = found
        rows = [self.describe(path, data) for path, data in model.commits[commit].items()]
        if kind == "tree":
            self.reply(200, json.dumps([tree_row(row) for row in rows]).encode())
            return
        gated = "manual" if model.is_gated else False
        info = {"id": model.name, "modelId": model.name, "sha": commit, "siblings": rows}
        info |= {"gated": gated, "private": model.is_private, "tags": [], "downloads": 0}
        self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def describe(self, path: str, data: bytes) -> dict[str, Any]:
        size = self.hub.sizes.get(path, len(data))
        row = {"rfilename": path, "size": size, "blobId": git_id(data)}
        if size >= self.hub.large:
            sha256 = hashlib.sha256(data).hexdigest()
            row["lfs"] = {"size": size, "sha256": sha256, "pointerSize": 134}
        return row

    def resolve(self, rest: str, token: str | None) -> None:
        organisation, name, kind, revision, *parts = [*rest.split("/"), "", "", "", ""]
        path = "/".join(parts).rstrip("/")
        found = self.find(f"{organisation}/{name}", revision, token) if kind == "resolve" else None
        if found is None:
            if kind != "resolve":
                self.refuse(404, "", "no such page")
            return
        model, commit = found
        if model.is_gated and token not in model.readers:
            reason = "Access to model is restricted; you must have access to it"
            self.refuse(401 if token is None else 403, "GatedRepo", reason)
            return
        data = model.commits[commit].get(path)
        if data is None:
            self.refuse(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if len(data) < self.hub.large:
            self.content(data, path, headers | {"ETag": f'"{git_id(data)}"'})
            return
        sha256 = hashlib.sha256(data).hexdigest()
        place = f"{self.hub.storage}/{model.name}/{commit}/{path}?Signature=s1gned"
        headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{sha256}"'}
        self.reply(302, b"", headers | {"Location": place})

    def store(self, path: str) -> None:
        if self.headers.get("Authorization"):
            self.refuse(400, "", "a token has no business here")
            return
        if self.hub.failing > 0:
            self.hub.failing -= 1
            self.refuse(503, "", "Slow Down")
            return
        organisation, name, commit, inner = path.lstrip("/").split("/", 3)
        data = self.hub.models[f"{organisation}/{name}"].commits[commit][inner]
        if inner in self.hub.flipped:
            self.hub.flipped.remove(inner)
            data = data[:-1] + bytes([data[-1] ^ 1])
        self.content(data, inner, {"Accept-Ranges": "bytes"})

    def content(self, data: bytes, path: str, headers: dict[str, str]) -> None:
        status, wanted = 200, self.headers.get("Range")
        if wanted:
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers |= {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"}
            status, data = 206, data[first:]
        breaks = self.hub.breaks.get(path)
        cut = breaks.pop(0) if breaks and self.command == "GET" else None
        self.reply(status, data, headers, cut, self.hub.stalls.get(path))

    def reply(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
        stall: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(data[: cut if stall is None else stall])
        if stall is not None:
            self.connection.settimeout(20)
            self.connection.recv(1)  # until the client goes away
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            if cut % 2:  # every other way: a reset, as a router that has lost the connection
                time.sleep(0.3)  # or the reset takes with it what the client has not read yet
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()

    def refuse(
        self, status: int, code: str, reason: str, headers: dict[str, str] | None = None
    ) -> None:
        given = {"X-Error-Message": reason, **({"X-Error-Code": code} if code else {})}
        self.reply(status, json.dumps({"error": reason}).encode(), given | (headers or {}))

    def log_message(self, *args: object) -> None:
        pass


def tree_row(row: dict[str, Any]) -> dict[str, Any]:
    """A file as /tree/ describes it."""
    found = {"type": "file", "path": row["rfilename"], "size": row["size"], "oid": row["blobId"]}
    lfs = row.get("lfs")
    if lfs:
        found["lfs"] = {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": 134}
    return found


class Server(ThreadingHTTPServer):
    """Quiet about clients that go away."""

    daemon_threads = True

    def handle_error(self, *args: object) -> None:
        pass


@contextmanager
def running(certificate: Path | None = None) -> Iterator[Hub]:
    """A hub on loopback; with a certificate (PEM with its key) it speaks TLS."""
    hub = Hub()
    servers = []
    for is_storage in (False, True):
        kind = type("Bound", (Handler,), {"hub": hub, "is_storage": is_storage})
        server = Server(("127.0.0.2" if is_storage else "127.0.0.1", 0), kind)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
    scheme = "http" if certificate is None else "https"
    hub.url, hub.storage = (
        f"{scheme}://{server.server_address[0]}:{server.server_port}" for server in servers
    )
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
