"""A small image registry with the faults of a real way there, and a `docker` that pulls from one.

The registry speaks as distribution 2.8 and Docker Hub do: manifests by tag and digest, blobs with
ranges and redirects to a storage on another port, bearer tokens and basic logins. FAKE_DOCKER is a
program for PATH that makes the requests that Docker 20.10 makes for a pull, and keeps names, ids
and layers in a directory instead of an engine.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import random
import ssl
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEX = "application/vnd.oci.image.index.v1+json"


def sha(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def tar(files: dict[str, bytes]) -> bytes:
    """A tar archive, the same for the same files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


@cache
def layer(number: int, size: int, seed: int) -> tuple[bytes, bytes]:
    """A layer of random content, plain and packed."""
    plain = tar({f"f{number}": random.Random(f"{number} {seed}").randbytes(size)})
    return plain, gzip.compress(plain, 1, mtime=0)


@dataclass
class Image:
    """An image of random layers."""

    layers: list[bytes]
    """Plain tar archives."""
    config: bytes
    blobs: dict[str, bytes]
    """By digest, as a registry has them."""
    manifest: bytes

    @classmethod
    def make(cls, *sizes: int, seed: int = 1) -> Image:
        """Make one; sizes of its layers in bytes."""
        layers, packed = zip(*(layer(n, size, seed) for n, size in enumerate(sizes)), strict=True)
        rootfs = {"type": "layers", "diff_ids": [sha(each) for each in layers]}
        config = json.dumps({"os": "linux", "seed": seed, "rootfs": rootfs}).encode()
        kind = "application/vnd.docker.image.rootfs.diff.tar.gzip"
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": "c", "size": len(config), "digest": sha(config)},
            "layers": [{"mediaType": kind, "size": len(e), "digest": sha(e)} for e in packed],
        }
        blobs = {sha(each): each for each in (config, *packed)}
        return cls(list(layers), config, blobs, json.dumps(manifest).encode())

    @property
    def id(self) -> str:
        return sha(self.config)

    @property
    def digest(self) -> str:
        return sha(self.manifest)

    @property
    def layer_digests(self) -> list[str]:
        return [each for each in self.blobs if each != self.id]

    def saved(self, tags: list[str] | None, is_new: bool = False) -> bytes:
        """What docker save makes of it: up to 24, or from 25 on with blobs/."""
        if is_new:
            names = [f"blobs/sha256/{sha(each)[7:]}" for each in self.layers]
            config = f"blobs/sha256/{self.id[7:]}"
        else:
            names = [f"{n:064x}/layer.tar" for n, _ in enumerate(self.layers)]
            config = f"{self.id[7:]}.json"
        contents = [{"Config": config, "RepoTags": tags, "Layers": names}]
        files = dict(zip(names, self.layers, strict=True))
        return tar({**files, config: self.config, "manifest.json": json.dumps(contents).encode()})


@dataclass
class Registry:
    """The server's state: what it has, what it was asked, what it does wrong."""

    repository: str = "acme/vllm"
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    auth: str = ""
    """"bearer", "basic" or open."""
    users: dict[str, str] = field(default_factory=dict)
    redirects: bool = False
    faults: dict[str, int] = field(default_factory=dict)
    """Status to answer instead, by a part of the path."""
    breaks: list[int] = field(default_factory=list)
    """The next blobs end after so many bytes of their body."""
    rate: int = 0
    """Bytes per second of a blob; 0: no limit."""
    ignores_ranges: bool = False
    requests: list[tuple[str, str, str, str]] = field(default_factory=list)
    """(server, path, range, authorization)"""
    host: str = ""
    storage: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def push(self, image: Image, tag: str = "1") -> None:
        self.blobs.update(image.blobs)
        self.manifests[tag] = self.manifests[image.digest] = (MANIFEST, image.manifest)

    def push_index(self, image: Image, other: Image, tag: str = "1") -> str:
        """An index of two platforms; its digest."""
        rows = [
            {"mediaType": MANIFEST, "size": 1, "digest": each.digest, "platform": {"os": os}}
            for each, os in ((other, "other"), (image, "linux"))
        ]
        body = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": rows}).encode()
        self.push(image)
        self.push(other)
        self.manifests[tag] = self.manifests[sha(body)] = (INDEX, body)
        return sha(body)

    def count(self, part: str) -> int:
        """How many requests had this in their path."""
        return sum(part in path for _, path, _, _ in self.requests)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Registry
    is_storage = False

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        state, login = self.state, self.headers.get("Authorization", "")
        where = "storage" if self.is_storage else "registry"
        with state.lock:
            state.requests.append((where, self.path, self.headers.get("Range", ""), login))
        path = urlsplit(self.path).path
        fault = next((code for part, code in state.faults.items() if part in self.path), 0)
        if fault:
            self.answer(fault, b"{}", {"Retry-After": "77"} if fault == 429 else {})
        elif self.is_storage:
            self.blob(path.lstrip("/"))
        elif path == "/token":
            self.token(login)
        elif not self.may_read(login):
            realm = f'realm="http://{state.host}/token",service="fake"'
            challenge = f"Bearer {realm}" if state.auth == "bearer" else 'Basic realm="fake"'
            self.answer(401, b"{}", {"WWW-Authenticate": challenge})
        else:
            self.read(path)

    def may_read(self, login: str) -> bool:
        if self.state.auth == "basic":
            return self.user(login) is not None
        return not self.state.auth or login == "Bearer let-me-in"

    def user(self, login: str) -> str | None:
        kind, _, text = login.partition(" ")
        user, _, password = base64.b64decode(text).decode().partition(":")
        return user if kind == "Basic" and self.state.users.get(user) == password else None

    def token(self, login: str) -> None:
        wanted = parse_qs(urlsplit(self.path).query)
        is_right = wanted.get("service") == ["fake"]
        is_right &= wanted.get("scope") == [f"repository:{self.state.repository}:pull"]
        if (self.state.users and not (login and self.user(login))) or not is_right:
            self.answer(401, b"{}")
        else:
            self.answer(200, b'{"token": "let-me-in"}')

    def read(self, path: str) -> None:
        prefix = f"/v2/{self.state.repository}/"
        kind, _, what = path.removeprefix(prefix).partition("/")
        if kind == "manifests" and what in self.state.manifests:
            media_type, body = self.state.manifests[what]
            self.answer(200, body, {"Content-Type": media_type})
        elif kind == "blobs" and what in self.state.blobs and self.state.redirects:
            self.answer(307, b"", {"Location": f"http://{self.state.storage}/{what}"})
        elif kind == "blobs" and what in self.state.blobs:
            self.blob(what)
        else:
            self.answer(404, b"{}")

    def blob(self, digest: str) -> None:
        data, begin = self.state.blobs[digest], 0
        asked = self.headers.get("Range")
        if asked and not self.state.ignores_ranges:
            begin = int(asked.removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(data) - begin))
        self.end_headers()
        data = data[begin:]
        with self.state.lock:
            # Not a config, which is smaller than any point to break at.
            is_broken = bool(self.state.breaks) and len(data) > self.state.breaks[0]
            end = self.state.breaks.pop(0) if is_broken else len(data)
        step = max(1, self.state.rate // 20) if self.state.rate else len(data) or 1
        for at in range(0, end, step):
            self.wfile.write(data[at : min(end, at + step)])
            if self.state.rate:
                time.sleep(0.05)
        if is_broken:
            self.close_connection = True

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@contextmanager
def served(state: Registry, context: ssl.SSLContext | None = None) -> Iterator[Registry]:
    """Run a registry and its storage on loopback."""
    servers = []
    for is_storage in (False, True):
        handler = type("Bound", (Handler,), {"state": state, "is_storage": is_storage})
        server = Server(("127.0.0.1", 0), handler)
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
    state.host, state.storage = (f"127.0.0.1:{each.server_port}" for each in servers)
    try:
        yield state
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


FAKE_DOCKER = '''
import json, os, sys

HOME = os.environ["FAKE_DOCKER"]  # names: {reference: id}; layers/; info.json; full; containerd
NAMES = os.path.join(HOME, "names.json")

def names():
    try:
        return json.load(open(NAMES))
    except FileNotFoundError:
        return {}

def keep(found):
    json.dump(found, open(NAMES + ".new", "w"))
    os.rename(NAMES + ".new", NAMES)

def fail(text):
    sys.exit("Error response from daemon: " + text)

def refuse_tls(host):
    """Ask as Docker with containerd's store does at first; only one answer leads it on to http."""
    import socket, ssl
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        ssl.create_default_context().wrap_bio(inward, outward, server_hostname="x").do_handshake()
    except ssl.SSLWantReadError:
        pass
    name, _, port = host.partition(":")
    with socket.create_connection((name, int(port)), timeout=60) as peer:
        peer.sendall(outward.read())
        answer = peer.makefile("rb").read()
    if not answer.startswith(b"HTTP/"):
        fail("tls: first record does not look like a TLS handshake")

def get(host, path, check=None, size=None):
    """A whole body; goes on where a connection broke, as Docker does."""
    import hashlib, http.client, time
    if os.path.exists(os.path.join(HOME, "containerd")):
        refuse_tls(host)
    data = b""
    for attempt in range(4):
        try:
            peer = http.client.HTTPConnection(host, timeout=60)
            peer.request("GET", path, headers={"Range": "bytes=%d-" % len(data)} if data else {})
            answer = peer.getresponse()
            if answer.status not in (200, 206):
                errors = json.loads(answer.read() or b"{}").get("errors", [])
                fail("%d: %s" % (answer.status, " ".join(e["message"] for e in errors)))
            while True:
                more = answer.read1(1 << 16)
                if not more:
                    break
                data += more
            if size is None or len(data) == size:
                break
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.2)
    else:
        fail("unexpected EOF")
    if check and "sha256:" + hashlib.sha256(data).hexdigest() != check:
        fail("filesystem layer verification failed for digest " + check)
    return data

def pull(name):
    host, _, rest = name.partition("/")
    repository, _, digest = rest.partition("@")
    get(host, "/v2/")
    manifest = json.loads(get(host, "/v2/%s/manifests/%s" % (repository, digest), digest))
    for each in manifest.get("manifests", []):
        if each["platform"]["os"] == "linux":
            path = "/v2/%s/manifests/%s" % (repository, each["digest"])
            manifest = json.loads(get(host, path, each["digest"]))
    blobs = "/v2/%s/blobs/" % repository
    config = manifest["config"]["digest"]
    get(host, blobs + config, config)

    def layer(each):
        path, short = os.path.join(HOME, "layers", each["digest"][7:]), each["digest"][7:19]
        if os.path.exists(path):
            print(short + ": Already exists", flush=True)
            return
        data = get(host, blobs + each["digest"], each["digest"], each["size"])
        if os.path.exists(os.path.join(HOME, "full")):
            fail("write /var/lib/docker/tmp/GetImageBlob1: no space left on device")
        open(path + ".new", "wb").write(data)
        os.rename(path + ".new", path)
        print(short + ": Pull complete", flush=True)

    from concurrent.futures import ThreadPoolExecutor
    os.makedirs(os.path.join(HOME, "layers"), exist_ok=True)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(layer, manifest["layers"]))
    keep(dict(names(), **{name: config}))

def main(argv):
    if argv[0] == "info":
        print(open(os.path.join(HOME, "info.json")).read())
    elif argv[0] == "pull":
        pull(argv[1])
    elif argv[0] == "tag":
        keep(dict(names(), **{argv[2]: names()[argv[1]]}))
    elif argv[0] == "rmi":
        keep({name: value for name, value in names().items() if name != argv[1]})
    elif argv[:2] == ["image", "inspect"]:
        known = names()
        if argv[-1] not in known:
            fail("No such image: " + argv[-1])
        found = {"Id": known[argv[-1]]}
        found["RepoDigests"] = [n for n in known if "@" in n and known[n] == found["Id"]]
        print(found["Id"] if "Id" in argv[3] else json.dumps(found))
    elif argv[0] == "save":
        os.link(os.path.join(HOME, "saved.tar"), argv[2])
    else:
        fail("what is " + argv[0])

main(sys.argv[1:])
'''
