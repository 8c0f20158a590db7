"""Gives hosts that have only the fabric their image from the head, with Docker's own pull.

Started like every program of remote/: `python3 - registry JSON`, its text over stdin. Roles:

resolve   On the head, first: what does the reference mean now? Keys: image (reference); archive
          (path of a `docker save` file: plain, .gz, .xz, .zst) or local (true: from the head's own
          Docker) instead of the registry; cache (directory, default CACHE). Result: digest (of the
          manifest or the index: the one that all hosts use), bytes (of all blobs; null for an
          index), seconds.
serve     On the head. A read-only registry of this one image: what is asked for is fetched once for
          all hosts, into `cache`, and given to each while it still comes. Keys: as for resolve;
          digest; tag (reference with a tag: the name that the image gets; null: no pull on the head
          itself); address (ours on the fabric, all that it binds beside 127.0.0.1), ports (the
          first free one is taken), receivers [{name, address}], patience, stall. Ends when every
          receiver is done, failed, or absent for `patience` seconds. Result: digest, id (Docker's,
          here), downloaded, served (bytes), receivers {name: {state (done, failed, absent),
          reason}}, kept (bytes in `cache`, because a receiver did not finish), seconds.
receive   On every other host, at the same time. Keys: image, digest, tag; name (ours), index (ours
          in the list of receivers), source (our fabric address), sender (the head's name), address,
          ports, patience, stall. Result: digest, id, received (bytes over the fabric), seconds.

Defaults: patience 60, stall 20 (seconds; without any sign of life the other side is given up). The
last line of stdout is one JSON object: the result, with cpu_seconds and peak_bytes, or {"error":
why}; it is left out where `result` is false. Before it come lines for people. An error is also on
stderr. Exit code 0: the image is here, under its name, complete. 1: it is not, and nothing
half-loaded has that name.

A receiver listens on its own 127.0.0.1, where Docker accepts plain http without any configuration,
takes connections from root and its own user only, and passes them on to the head. Docker pulls
127.0.0.1:PORT/REPOSITORY@DIGEST: only layers that it lacks, several at a time, each against its
sha256. The result is tagged with the real name, and the temporary name is removed.

TOKEN is secret and argv is not, so it comes inside the text: keyed(source("registry"), token). It
never crosses the wire: both sides prove with HMAC that they know it.

An archive is served as a registry too, with its layers as they lie in the file, to the head as
well: so all hosts run the same pull and have the same id.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import hmac
import http.client
import http.server
import ipaddress
import json
import os
import re
import secrets
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tarfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

TOKEN = ""

CACHE = "/var/tmp/vllm-image"  # noqa: S108 -- of mode 0700, and refused where it is not ours
DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
HUB_KEY = "https://index.docker.io/v1/"
"""Under which `docker login` keeps what Docker Hub wants."""
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEXES = (
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.index.v1+json",
)
MANIFESTS = (DOCKER_MANIFEST, "application/vnd.oci.image.manifest.v1+json", *INDEXES)
CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
LAYER_TYPES = (
    (b"\x1f\x8b", "application/vnd.docker.image.rootfs.diff.tar.gzip"),
    (b"\x28\xb5\x2f\xfd", "application/vnd.oci.image.layer.v1.tar+zstd"),
    (b"", "application/vnd.docker.image.rootfs.diff.tar"),
)
"""By the first bytes of a layer."""
UNPACKERS = ((b"\x1f\x8b", "gzip"), (b"\xfd7zXZ", "xz"), (b"\x28\xb5\x2f\xfd", "zstd"))
"""What unpacks an archive, by its first bytes."""
BUFFER = 256 << 10
SEND_BYTES = 4 << 20
ATTEMPTS = 5
"""At a file of the registry, in a row without a new byte."""
OUTSIDE_SECONDS = 30
"""Without a byte from the registry, until it is tried again."""
GREETING_SECONDS = 5
STRANGERS = 32
"""Connections that may be open without having shown the token."""
FAREWELL_SECONDS = 5
"""How long the head stays after a failure, so that every receiver hears the reason."""
PROGRESS_SECONDS = 2
MANIFEST_BYTES = 4 << 20
GREETING = b"IMAGE 1\n"
NONCE, PROOF = 16, 32
CONTROL, DATA = 0, 1
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
OURS = re.compile(r"(?:[0-9a-f]{64}|archive-[0-9a-f]{32}\.tar|saved\.tar\.[0-9a-f]{64})(?:\.part)?")
"""Names of files in the cache."""
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)


class ImageError(Exception):
    """What goes wrong, for a person: what, where, why, what to do. status: in HTTP's terms."""

    def __init__(self, reason: str, status: int = 502) -> None:
        super().__init__(reason)
        self.status = status


class UnreachableError(ImageError):
    """There was no answer at all; another address may give one."""


def keyed(text: str, token: str) -> str:
    """The text of this program with the token in it: a new hexadecimal one for every transfer."""
    if not token.isalnum():
        raise ValueError("a token has letters and digits only")
    return text.replace('\nTOKEN = ""\n', '\nTOKEN = "%s"\n' % token, 1)


def say(line: str) -> None:
    print(line, flush=True)


def why(error: OSError) -> str:
    return error.strerror or str(error)


class Reference(NamedTuple):
    """The name of an image, as Docker reads it. `what`: a tag or a digest."""

    host: str
    repository: str
    what: str

    @classmethod
    def parse(cls, name: str) -> Reference:
        """Read registry/repository:tag@digest; a digest counts more than a tag."""
        rest, _, digest = name.partition("@")
        first, slash, path = rest.partition("/")
        is_host = slash and ("." in first or ":" in first or first == "localhost")
        host, path = (first, path) if is_host else (DOCKER_HUB[0], rest)
        path, _, tag = path.partition(":")
        if host in DOCKER_HUB:
            host, path = DOCKER_HUB[0], path if "/" in path else "library/" + path
        return cls(host, path, digest or tag or "latest")


def docker(*argv: str) -> str:
    """Run a short docker command; raises ImageError with what it complained of."""
    try:
        done = subprocess.run(("docker", *argv), stdout=-1, stderr=-1, timeout=120)
    except FileNotFoundError:
        raise ImageError("there is no docker command on this host: install Docker") from None
    except subprocess.TimeoutExpired:
        raise ImageError("Docker gives no answer within 120 s (docker %s)" % argv[0]) from None
    if done.returncode:
        raise ImageError("docker %s: %s" % (argv[0], last_line(done.stderr)))
    return done.stdout.decode(errors="replace").strip()


def last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it gave no reason"


# The head: where the image comes from.


class Blob:
    """A layer or a config: where it is on this disk, and how much of it is there already."""

    def __init__(self, digest: str, size: int, file: int = -1, start: int = 0) -> None:
        self.digest, self.size, self.file, self.start = digest, size, file, start
        self.ready = size if file >= 0 else 0
        self.error: ImageError | None = None
        self.is_asked = file >= 0
        self.news = threading.Condition()

    def grow(self, count: int) -> None:
        """So many bytes more are there."""
        with self.news:
            self.ready += count
            self.news.notify_all()

    def fail(self, error: ImageError) -> None:
        """It will not come; whoever waits for it hears why."""
        with self.news:
            self.error = error
            self.news.notify_all()

    def wait(self, offset: int) -> int:
        """Wait for a byte behind `offset`; return how many are ready. Raises ImageError."""
        with self.news:
            self.news.wait_for(lambda: self.error or self.ready > offset or offset >= self.size)
            if self.error and self.ready <= offset:
                raise self.error
            return self.ready


class Source:
    """An image: its manifests and blobs. Subclasses know where they come from."""

    def __init__(self, reference: Reference, cache: str) -> None:
        self.reference, self.cache = reference, cache
        self.manifests: Dict[str, Tuple[bytes, str]] = {}
        self.blobs: Dict[str, Blob] = {}
        self.children: List[str] = []
        """Digests of the manifests that an index names."""
        self.downloaded = 0
        self.error: ImageError | None = None
        """Why no receiver can succeed any more."""
        self.lock = threading.RLock()

    def resolve(self) -> str:
        """The digest that the reference means now. Raises ImageError."""
        raise NotImplementedError

    def manifest(self, digest: str) -> Tuple[bytes, str] | None:
        """Return (text, media type); None for one that is not of this image."""
        return self.manifests.get(digest)

    def blob(self, digest: str) -> Blob | None:
        """A blob of this image that is there or comes; None for any other."""
        return self.blobs.get(digest)

    def learn(self, body: bytes, media_type: str) -> str:
        """Keep a manifest and what it names; return its digest."""
        digest = "sha256:" + hashlib.sha256(body).hexdigest()
        try:
            found = json.loads(body)
            with self.lock:
                self.children += [str(each["digest"]) for each in found.get("manifests", [])]
                for each in descriptors(found):
                    if DIGEST.fullmatch(each["digest"]):
                        name = each["digest"]
                        self.blobs.setdefault(name, Blob(name, int(each["size"])))
                self.manifests[digest] = (body, media_type)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ImageError(
                "%s answers with something that is no image manifest" % self.reference.host
            ) from None
        return digest

    def layers(self, digest: str) -> Dict[str, int]:
        """Sizes of a manifest's layers by the short names that docker pull prints."""
        found = json.loads(self.manifests[digest][0])
        return {each["digest"][7:19]: each["size"] for each in found.get("layers", [])}


def descriptors(manifest: Dict[str, Any]) -> List[Dict[str, Any]]:
    return [manifest["config"], *manifest.get("layers", [])] if "config" in manifest else []


class Archive(Source):
    """A `docker save` file. Its layers are served as they lie in it, from where they lie."""

    def __init__(self, image: str, cache: str, path: str) -> None:
        super().__init__(Reference.parse(image), cache)
        self.image, self.path = image, path

    def resolve(self) -> str:
        """Read the table of contents, and make a manifest from it."""
        try:
            file = os.open(plain(self.path, self.cache), os.O_RDONLY | os.O_CLOEXEC)
            with tarfile.open(fileobj=os.fdopen(os.dup(file), "rb"), mode="r:") as archive:
                members = {os.path.normpath(each.name): each for each in archive}
                image = self.choose(json.loads(content(archive, members, "manifest.json")))
                config = content(archive, members, image["Config"])
                layers = [self.layer(archive, members, each) for each in image["Layers"]]
            diffs = json.loads(config)["rootfs"]["diff_ids"]
        except OSError as error:
            raise ImageError("cannot read the archive %s: %s" % (self.path, why(error))) from None
        except (tarfile.TarError, ValueError, KeyError, TypeError) as error:
            raise ImageError(
                "%s is no complete `docker save` archive (%s): make it again with docker save "
                "-o FILE %s" % (self.path, error, self.image)
            ) from None
        offset = members[os.path.normpath(image["Config"])].offset_data
        rows = []
        for (member, media_type), diff in zip(layers, diffs):  # noqa: B905 -- Python 3.8
            name = os.path.basename(member.name)
            # Older Dockers name a layer by something else, but never pack it: its digest is the
            # diff id. What the file holds is checked by the Docker that pulls it.
            is_named = os.path.dirname(os.path.normpath(member.name)) == "blobs/sha256"
            digest = "sha256:" + name if is_named else diff
            self.blobs[digest] = Blob(digest, member.size, file, member.offset_data)
            rows.append({"mediaType": media_type, "size": member.size, "digest": digest})
        digest = "sha256:" + hashlib.sha256(config).hexdigest()
        self.blobs[digest] = Blob(digest, len(config), file, offset)
        manifest = {
            "schemaVersion": 2,
            "mediaType": DOCKER_MANIFEST,
            "config": {"mediaType": CONFIG_TYPE, "size": len(config), "digest": digest},
            "layers": rows,
        }
        return self.learn(json.dumps(manifest, sort_keys=True).encode(), DOCKER_MANIFEST)

    def choose(self, images: List[Dict[str, Any]]) -> Dict[str, Any]:
        """The image of the wanted name; one without any name where it is the only one.

        No archive knows a registry's digest: for one, any tag of the repository will do.
        """
        wanted = self.reference
        names: List[str] = []
        for image in images:
            own = image.get("RepoTags") or []
            for found in map(Reference.parse, own):
                if found == wanted or (":" in wanted.what and found[:2] == wanted[:2]):
                    return image
            if not own and len(images) == 1:
                return image
            names += own
        raise ImageError(
            "the archive %s has no image named %s; it has %s: set image in cluster.yaml to one of "
            "them, or save the right one" % (self.path, self.image, ", ".join(names) or "none")
        )

    def layer(
        self, archive: tarfile.TarFile, members: Dict[str, tarfile.TarInfo], name: str
    ) -> Tuple[tarfile.TarInfo, str]:
        """The file of a layer, links followed (Docker before 25 saves equal ones as links)."""
        member = members[os.path.normpath(name)]
        while member.issym() or member.islnk():
            where = os.path.dirname(member.name) if member.issym() else ""
            member = members[os.path.normpath(os.path.join(where, member.linkname))]
        stream = archive.extractfile(member)
        first = stream.read(4) if stream else b""
        return member, next(kind for magic, kind in LAYER_TYPES if first.startswith(magic))


def content(archive: tarfile.TarFile, members: Dict[str, tarfile.TarInfo], name: str) -> bytes:
    """A small file of an archive; raises KeyError where it is not there."""
    member = members[os.path.normpath(name)]
    stream = archive.extractfile(member) if member.size <= MANIFEST_BYTES else None
    if stream is None:
        raise KeyError(name)
    return stream.read()


def plain(path: str, cache: str) -> str:
    """The archive, unpacked into the cache if it is packed, once."""
    with open(path, "rb") as file:
        first, info = file.read(8), os.fstat(file.fileno())
    tool = next((tool for magic, tool in UNPACKERS if first.startswith(magic)), None)
    if tool is None:
        return path
    mark = hashlib.sha256(repr((path, info.st_size, info.st_mtime_ns)).encode()).hexdigest()
    target = os.path.join(cache, "archive-%s.tar" % mark[:32])
    if os.path.exists(target):
        return target
    say("unpacking %s with %s" % (path, tool))
    try:
        with open(target + ".part", "wb") as out:
            done = subprocess.run((tool, "-dc", path), stdout=out, stderr=-1)
    except FileNotFoundError:
        raise ImageError(
            "%s is packed with %s, which this host lacks: install %s here, or give the archive "
            "unpacked" % (path, tool, tool)
        ) from None
    if done.returncode:
        os.unlink(target + ".part")
        raise ImageError("%s cannot be unpacked: %s" % (path, last_line(done.stderr)))
    os.rename(target + ".part", target)
    return target


class Registry(Source):
    """A real registry, read as Docker reads it: its login, its mirrors, its certificates."""

    def __init__(self, reference: Reference, cache: str) -> None:
        super().__init__(reference, cache)
        information = json.loads(docker("info", "--format", "{{json .}}") or "{}")
        configuration = information.get("RegistryConfig") or {}
        self.is_checked = is_secure(reference.host, configuration)
        self.bases = bases(reference.host, configuration)
        for name in ("HttpProxy", "HttpsProxy", "NoProxy"):
            # Docker's own way out; its passwords are shown as xxxxx, then ours has to do.
            value = information.get(name)
            if value and "xxxxx" not in value:
                os.environ[name.replace("P", "_p").lower()] = value
        self.base = self.bases[0]
        self.user, self.login_state = "", ""
        self.authorization: Dict[str, str] = {}

    def resolve(self) -> str:
        """Ask the registry, or the first of its mirrors that knows the image."""
        return self.fetch_manifest(self.reference.what, self.bases)

    def manifest(self, digest: str) -> Tuple[bytes, str] | None:
        """Fetch a manifest of this image, once."""
        with self.lock:
            if digest not in self.manifests:
                is_first = not self.manifests
                if not is_first and digest not in self.children:
                    return None
                got = self.fetch_manifest(digest, self.bases if is_first else [self.base])
                if got != digest:
                    raise ImageError(
                        "%s sends something else under %s: a proxy or a fault on the way"
                        % (self.base, digest)
                    )
            return self.manifests[digest]

    def fetch_manifest(self, what: str, bases: List[str]) -> str:
        """Fetch, learn, and stay with the address that had it; return its digest."""
        for base in bases:
            self.base = base
            try:
                with self.open("manifests/" + what, {"Accept": ", ".join(MANIFESTS)}) as answer:
                    body, kind = answer.read(MANIFEST_BYTES), answer.headers.get_content_type()
                if kind not in MANIFESTS:
                    raise ImageError(
                        "%s has %s only in a format that is too old (%s): push it again"
                        % (base, what, kind)
                    )
                return self.learn(body, kind)
            except ImageError as error:
                is_mirror = self.reference.host == DOCKER_HUB[0] and base != self.bases[-1]
                if base == bases[-1] or not (is_mirror or isinstance(error, UnreachableError)):
                    raise
            except (OSError, http.client.HTTPException) as error:
                if base == bases[-1]:
                    raise UnreachableError(
                        "%s breaks the connection off: %s" % (base, error)
                    ) from None
        raise AssertionError("there is always a last address")

    def blob(self, digest: str) -> Blob | None:
        """A blob of this image; the first who asks has it fetched."""
        with self.lock:
            blob = self.blobs.get(digest)
            if blob is not None and not blob.is_asked:
                blob.is_asked = True
                threading.Thread(target=self.fetch, args=(blob,), daemon=True).start()
            return blob

    def fetch(self, blob: Blob) -> None:
        """Bring a blob into the cache, in several attempts if need be."""
        path = os.path.join(self.cache, blob.digest[7:])
        try:
            self.fetch_into(blob, path)
        except ImageError as error:
            self.error = self.error or error
            blob.fail(error)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = ImageError(
                "the head's disk is full at %s: make room, or set another cache" % self.cache
                if full
                else "the head cannot write to %s: %s" % (self.cache, why(error))
            )
            if full:
                with contextlib.suppress(OSError):
                    os.unlink(path + ".part")
            self.error = self.error or reason
            blob.fail(reason)

    def fetch_into(self, blob: Blob, path: str) -> None:
        """Fetch what is missing behind what an earlier run has left."""
        is_whole = os.path.exists(path)
        file = os.open(path if is_whole else path + ".part", os.O_RDWR | os.O_CREAT, 0o600)
        digest, have = hashlib.sha256(), 0
        while True:
            chunk = os.pread(file, 1 << 20, have)
            if not chunk:
                break
            digest.update(chunk)
            have += len(chunk)
        if have > blob.size or (have == blob.size and digest.hexdigest() != blob.digest[7:]):
            os.ftruncate(file, 0)
            digest, have = hashlib.sha256(), 0
        blob.file = file
        blob.grow(have)
        failures = 0
        while blob.ready < blob.size:
            before = blob.ready
            try:
                self.fetch_rest(blob, digest)
                if blob.ready < blob.size:
                    raise http.client.IncompleteRead(b"")
            except (OSError, http.client.HTTPException, UnreachableError) as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                failures = 1 if blob.ready > before else failures + 1
                if failures >= ATTEMPTS:
                    if isinstance(error, ImageError):
                        raise
                    raise UnreachableError(
                        "%s breaks off again and again in the middle of a layer (%s); what came "
                        "is kept: run it again" % (self.base, error or type(error).__name__)
                    ) from None
                time.sleep(min(8, 0.5 * 2**failures))
        if digest.hexdigest() != blob.digest[7:]:
            os.unlink(path if is_whole else path + ".part")
            raise ImageError(
                "what %s sends under %s has another sha256: a proxy or a fault on the way, or a "
                "damaged registry; run it again" % (self.base, blob.digest)
            )
        if not is_whole:
            os.rename(path + ".part", path)

    def fetch_rest(self, blob: Blob, digest: Any) -> None:
        """One attempt: from where it is to where the connection ends."""
        headers = {"Range": "bytes=%d-" % blob.ready} if blob.ready else {}
        with self.open("blobs/" + blob.digest, headers) as answer:
            skip = 0 if answer.status == 206 else blob.ready
            while blob.ready < blob.size:
                data = answer.read(min(BUFFER, blob.size - blob.ready + skip))
                if not data:
                    return
                data, skip = data[skip:], max(0, skip - len(data))
                digest.update(data)
                view, at = memoryview(data), blob.ready
                while len(view):
                    count = os.pwrite(blob.file, view, at)
                    view, at = view[count:], at + count
                with self.lock:
                    self.downloaded += len(data)
                blob.grow(len(data))

    # How a registry is asked.

    def open(self, path: str, headers: Dict[str, str]) -> Any:
        """GET, with a login where one is asked for. Raises ImageError, UnreachableError."""
        url = "%s/v2/%s/%s" % (self.base, self.reference.repository, path)
        for attempt in (1, 2):
            request = urllib.request.Request(url, headers=headers)
            used = self.authorization.get(self.base, "")
            if used:  # not for the storage that a registry redirects to
                request.add_unredirected_header("Authorization", used)
            try:
                return self.ask(request)
            except urllib.error.HTTPError as error:
                error.close()
                challenges = error.headers.get_all("WWW-Authenticate") or []
                if error.code == 401 and attempt == 1 and challenges:
                    self.log_in(challenges)
                    continue
                raise self.refusal(error, path) from None
        raise AssertionError("the second attempt returns or raises")

    def ask(self, request: urllib.request.Request) -> Any:
        """Send one request. Raises HTTPError for an answer, UnreachableError for none."""
        host = urllib.parse.urlsplit(request.full_url).netloc
        context = tls(host, self.is_checked)
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
        try:
            return opener.open(request, timeout=OUTSIDE_SECONDS)
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError as error:
            raise UnreachableError(unreachable(host, error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(unreachable(host, error)) from None

    def log_in(self, challenges: List[str]) -> None:
        """Answer WWW-Authenticate with what `docker login` has left on this host, if anything."""
        host = urllib.parse.urlsplit(self.base).netloc
        user, password, refresh, self.login_state = credentials(host)
        self.user = user
        basic = ""
        if user and password:
            text = ("%s:%s" % (user, password)).encode()
            basic = "Basic " + base64.b64encode(text).decode()
        bearer = next((each for each in challenges if each.lower().startswith("bearer")), None)
        if bearer is None:
            self.authorization[self.base] = basic
            return
        fields = dict(re.findall(r'(\w+)="([^"]*)"', bearer))
        scope = fields.get("scope") or "repository:%s:pull" % self.reference.repository
        query = {"service": fields.get("service", ""), "scope": scope}
        realm, data = fields.get("realm", ""), None
        if refresh:
            query.update(grant_type="refresh_token", refresh_token=refresh, client_id="docker")
            data = urllib.parse.urlencode(query).encode()
        else:
            mark = "&" if "?" in realm else "?"
            realm += mark + urllib.parse.urlencode(query)
        request = urllib.request.Request(realm, data=data)
        if basic and not refresh:
            request.add_unredirected_header("Authorization", basic)
        try:
            with self.ask(request) as answer:
                found = json.loads(answer.read(MANIFEST_BYTES))
            token = found.get("token") or found["access_token"]
        except urllib.error.HTTPError as error:
            error.close()
            raise self.refusal(error, "") from None
        except (ValueError, KeyError, TypeError):
            raise ImageError("%s gives no token" % fields.get("realm")) from None
        self.authorization[self.base] = "Bearer " + token

    def refusal(self, error: urllib.error.HTTPError, path: str) -> ImageError:
        """What an answer other than 200 means, and what to do."""
        host, name = urllib.parse.urlsplit(self.base).netloc, self.reference.repository
        shown = DOCKER_HUB[0] if self.reference.host == DOCKER_HUB[0] else host
        code = error.code
        if code in (401, 403):
            to = "" if shown == DOCKER_HUB[0] else " " + shown
            text = (
                "%s does not let the head read %s (%d): it is private, or does not exist. As the "
                "user that this runs as on the head, run: docker login%s (%s)"
            )
            return ImageError(text % (shown, name, code, to, self.login_state or "no login"), code)
        if code == 404:
            return ImageError(
                "%s has no %s of %s (404): is image in cluster.yaml right?"
                % (shown, path.partition("/")[2] or "such thing", name),
                code,
            )
        if code == 429:
            after = error.headers.get("Retry-After")
            return ImageError(
                "%s gives no more now: its limit of pulls is reached (429) for %s. Wait%s, or run "
                "docker login on the head with an account that may pull more"
                % (
                    shown,
                    self.user or "everyone without a login at this address",
                    " %s s" % after if after else "",
                ),
                code,
            )
        if code >= 500:
            return UnreachableError("%s is out of order (%d): try again later" % (shown, code))
        return ImageError("%s answers %d to %s of %s" % (shown, code, path, name))


def bases(host: str, configuration: Dict[str, Any]) -> List[str]:
    """Where Docker on this host would look for a registry, in its order, from `docker info`."""
    if host == DOCKER_HUB[0]:
        mirrors = [str(each).rstrip("/") for each in configuration.get("Mirrors") or []]
        return [*mirrors, "https://registry-1.docker.io"]
    if is_secure(host, configuration):
        return ["https://" + host]
    return ["https://" + host, "http://" + host]


def is_secure(host: str, configuration: Dict[str, Any]) -> bool:
    """Whether Docker on this host insists on TLS and a certificate that it trusts."""
    index = (configuration.get("IndexConfigs") or {}).get(host)
    if index is not None:
        return bool(index.get("Secure", True))
    return not is_within(host, configuration.get("InsecureRegistryCIDRs") or [])


def is_within(host: str, networks: List[str]) -> bool:
    """Whether any address of a host lies in networks where Docker accepts plain http."""
    try:
        found = socket.getaddrinfo(host.rpartition(":")[0] or host, None, type=socket.SOCK_STREAM)
        addresses = {ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found}
    except (OSError, ValueError):
        return False
    return any(one in ipaddress.ip_network(net) for one in addresses for net in networks)


def tls(host: str, is_checked: bool) -> ssl.SSLContext:
    """How a registry proves who it is: the system's authorities, and Docker's for this host."""
    context = ssl.create_default_context()
    folder = os.path.join("/etc/docker/certs.d", host)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    for name in names:
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            if name.endswith(".crt"):
                context.load_verify_locations(path)
            elif name.endswith(".cert"):
                context.load_cert_chain(path, path[: -len("cert")] + "key")
    if not is_checked:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def unreachable(host: str, reason: Any) -> str:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return (
            "the head does not trust the certificate of %s (%s): put the authority's certificate "
            "into /etc/docker/certs.d/%s/ca.crt there" % (host, reason.verify_message, host)
        )
    if isinstance(reason, ssl.SSLError):
        return (
            "%s does not speak TLS (%s): if it is a plain-http registry, name it under "
            "insecure-registries in the head's /etc/docker/daemon.json" % (host, reason.reason)
        )
    if isinstance(reason, socket.gaierror):
        return "the head cannot resolve the name %s: %s" % (host, why(reason))
    if isinstance(reason, socket.timeout):
        reason = "no answer within %d s: a firewall, or a proxy is needed" % OUTSIDE_SECONDS
    return "the head cannot reach the registry %s: %s" % (host, reason)


def credentials(host: str) -> Tuple[str, str, str, str]:
    """Return (user, password, refresh token, where it was looked for) from docker login."""
    key = HUB_KEY if host == "registry-1.docker.io" else host
    folder = os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        helper = (config.get("credHelpers") or {}).get(key) or config.get("credsStore")
        if helper:
            done = subprocess.run(
                ("docker-credential-" + helper, "get"), input=key.encode(), stdout=-1, stderr=-1
            )
            if done.returncode == 0:
                found = json.loads(done.stdout)
                user, secret = str(found["Username"]), str(found["Secret"])
                state = "the login of %s in %s was refused" % (user, helper)
                return ("", "", secret, state) if user == "<token>" else (user, secret, "", state)
        entry = (config.get("auths") or {}).get(key) or {}
        text = base64.b64decode(entry.get("auth") or "").decode()
        user, _, password = text.partition(":")
        refresh = str(entry.get("identitytoken") or "")
    except FileNotFoundError:
        return "", "", "", "there is no %s" % path
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return "", "", "", "%s cannot be used: %s" % (path, error)
    if not user and not refresh:
        return "", "", "", "%s has no login for it" % path
    return user, password, refresh, "the login of %s in %s was refused" % (user or "it", path)


def own_directory(path: str) -> str:
    """Make a directory for this run alone; one that another run has is left to it."""
    for name in (path, *("%s.%d" % (path, number) for number in range(2, 10))):
        try:
            os.makedirs(name, 0o700, exist_ok=True)
            file = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            if os.fstat(file).st_uid != os.getuid():
                raise ImageError("%s is another user's: remove it, or set another cache" % name)
            os.fchmod(file, 0o700)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this program ends
            return name
        except BlockingIOError:
            os.close(file)
        except OSError as error:
            raise ImageError("cannot make %s: %s" % (name, why(error))) from None
    raise ImageError("too many runs use %s at the same time" % path)


def clear(cache: str) -> None:
    """Remove what we have put there, and nothing else."""
    with contextlib.suppress(OSError):
        for name in os.listdir(cache):
            if OURS.fullmatch(name):
                os.unlink(os.path.join(cache, name))
        os.rmdir(cache)


def open_source(wanted: Dict[str, Any]) -> Source:
    """Where the image comes from; makes the cache directory. Raises ImageError."""
    image, cache = wanted["image"], own_directory(wanted.get("cache") or CACHE)
    if wanted.get("archive"):
        return Archive(image, cache, wanted["archive"])
    if wanted.get("local"):
        identity = docker("image", "inspect", "--format", "{{.Id}}", image)
        path = os.path.join(cache, "saved.tar." + identity[7:])
        if not os.path.exists(path):
            docker_save(image, path)
        return Archive(image, cache, path)
    return Registry(Reference.parse(image), cache)


def docker_save(image: str, path: str) -> None:
    say("taking the image out of this host's Docker")
    done = subprocess.run(("docker", "save", "-o", path + ".part", image), stdout=-1, stderr=-1)
    if done.returncode:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + ".part")
        raise ImageError("docker save %s: %s" % (image, last_line(done.stderr)))
    os.rename(path + ".part", path)


def resolve(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """Role resolve."""
    source = open_source(wanted)
    digest = source.resolve()
    is_index = source.manifests[digest][1] in INDEXES
    size = None if is_index else sum(blob.size for blob in source.blobs.values())
    return {"digest": digest, "bytes": size}


# The head: how the image is given on.


class Wire:
    """A connection over the fabric, after both sides have shown that they know the token."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.nonces = b""
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self, count: int) -> bytes:
        """Read exactly as much; EOFError when the other side has gone."""
        data = b""
        while len(data) < count:
            more = self.peer.recv(count - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def sign(self, what: bytes) -> bytes:
        """The proof that we know the token, good for this connection only."""
        return hmac.new(TOKEN.encode(), self.nonces + what, "sha256").digest()

    def send(self, what: Dict[str, Any]) -> None:
        """Send an object on the control connection."""
        body = json.dumps(what).encode()
        self.peer.sendall(struct.pack(">I", len(body)) + body)

    def receive(self) -> Dict[str, Any]:
        """Take what send() has sent."""
        (size,) = struct.unpack(">I", self.read(4))
        if size > MANIFEST_BYTES:
            raise EOFError
        return dict(json.loads(self.read(size)))


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
            sent = os.sendfile(self.connection.fileno(), blob.file, blob.start + begin, count)
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
        self.strangers = 0
        self.lock = threading.Lock()
        self.open: List[socket.socket] = []
        self.fabric = self.listen(wanted["address"], wanted["ports"], self.welcome)
        self.port = self.listen("127.0.0.1", [0], self.welcome_docker)

    def listen(self, address: str, ports: List[int], greet: Callable[..., None]) -> int:
        """Listen on the first port that is free; return it."""
        reasons = []
        for port in ports:
            server = socket.socket()
            try:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind((address, port))
                server.listen(128)
            except OSError as error:
                server.close()
                if error.errno == errno.EADDRNOTAVAIL:
                    raise ImageError(
                        "this host has no address %s: check its fabric address and interface"
                        % address
                    ) from None
                reasons.append("port %d: %s" % (port, why(error)))
                continue
            self.open.append(server)
            threading.Thread(target=accept, args=(server, greet), daemon=True).start()
            return int(server.getsockname()[1])
        raise ImageError("cannot listen on %s: %s" % (address, "; ".join(reasons)))

    def welcome_docker(self, peer: socket.socket) -> None:
        """Serve this host's own Docker."""
        if may_use(peer):
            self.serve(peer, self.own)

    def welcome(self, peer: socket.socket) -> None:
        """Serve a receiver over the fabric, once it has shown the token."""
        with self.lock:
            if self.strangers >= STRANGERS:
                return
            self.strangers += 1
        try:
            wire, index, kind = self.greet(peer)
        except (OSError, EOFError, struct.error):
            return
        finally:
            with self.lock:
                self.strangers -= 1
        if kind == CONTROL:
            self.converse(wire, self.receivers[index])
        else:
            self.serve(peer, self.receivers[index])

    def greet(self, peer: socket.socket) -> Tuple[Wire, int, int]:
        """Return (wire, number of the receiver, kind); EOFError for a stranger."""
        wire = Wire(peer)
        peer.settimeout(GREETING_SECONDS)
        nonce = secrets.token_bytes(NONCE)
        peer.sendall(GREETING + nonce)
        answer = wire.read(NONCE + 4)
        index, kind = struct.unpack(">HH", answer[NONCE:])
        wire.nonces = nonce + answer[:NONCE]
        proof, who = wire.read(PROOF), answer[NONCE:]
        if not hmac.compare_digest(proof, wire.sign(b"receive" + who)):
            raise EOFError
        if index >= len(self.receivers) or peer.getpeername()[0] != self.receivers[index].address:
            raise EOFError
        peer.sendall(wire.sign(b"send" + who))
        peer.settimeout(None)
        return wire, index, kind

    def serve(self, peer: socket.socket, receiver: Receiver) -> None:
        """Answer requests on a connection until it ends."""
        self.open.append(peer)
        # Docker may unpack for a while and not read; who never reads again is cut off.
        limit(peer, socket.SO_SNDTIMEO, max(60, self.stall))
        handler = type("Bound", (Handler,), {"endpoint": self, "receiver": receiver})
        with contextlib.suppress(OSError):
            handler(peer, peer.getpeername(), self)

    def converse(self, wire: Wire, receiver: Receiver) -> None:
        """Exchange signs of life and news with a receiver until it is over."""
        self.open.append(wire.peer)
        wire.peer.settimeout(self.stall)
        receiver.is_connected = True
        receiver.state, receiver.reason = "running", ""
        try:
            while not receiver.is_over:
                news = wire.receive()
                error = self.source.error
                wire.send(
                    {
                        "ready": self.is_ready,
                        "layers": receiver.layers,
                        "error": str(error) if error else None,
                    }
                )
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


def hang_up(peer: socket.socket) -> None:
    """End a connection or a listener that another thread may be using."""
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        peer.close()


def limit(peer: socket.socket, option: int, seconds: float) -> None:
    """Set a time limit in the kernel, where sendfile knows it too."""
    peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), 0))


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


def serve(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """Role serve."""
    source = open_source(wanted)
    patience, began = wanted.get("patience", 60), time.monotonic()
    endpoint = Endpoint(wanted, source)
    image_id, is_finished = None, False
    try:
        try:
            if isinstance(source, Archive):
                got = source.resolve()
                if got != wanted["digest"]:
                    raise ImageError("the archive has changed meanwhile: run it again")
            elif source.manifest(wanted["digest"]) is None:
                raise AssertionError("the first manifest is always asked for")
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


def size_of(folder: str) -> int:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sum(each.stat().st_size for each in entries)
    return 0


def stay() -> None:
    """Raise ImageError when nobody reads what we print: the deployment has been stopped."""
    poll = select.poll()
    poll.register(1, 0)
    if any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0)):
        raise ImageError("the deployment that started this has ended")


def wait_until(
    condition: Callable[[], bool], seconds: float, tick: Callable[[], None] = lambda: None
) -> bool:
    """Wait for a condition; whether it came."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        tick()
        time.sleep(0.05)
    return True


# Every host: Docker's pull.


class Progress:
    """Reads what docker pull prints, and says how far it is, at most every PROGRESS_SECONDS."""

    def __init__(self, layers: Callable[[], Dict[str, int]], count: Callable[[], int]) -> None:
        self.layers, self.count = layers, count
        self.began = self.spoken = time.monotonic()
        self.here: set[str] = set()
        self.complete: set[str] = set()

    def hear(self, line: str) -> None:
        """Take a line like `0a1b2c3d4e5f: Pull complete`."""
        layer, _, what = line.partition(": ")
        if what.startswith("Already exists"):
            self.here.add(layer)
        elif what.startswith("Pull complete"):
            self.complete.add(layer)

    def tell(self) -> None:
        """Say it, if there is time again."""
        now, layers = time.monotonic(), self.layers()
        if now - self.spoken < PROGRESS_SECONDS or not layers:
            return
        self.spoken = now
        lacking = {name: size for name, size in layers.items() if name not in self.here}
        total, done = sum(lacking.values()), self.count()
        if done < total:
            rate = done / (now - self.began)
            left = "%d s left" % ((total - done) / rate) if rate else "waiting"
            say(
                "image: %.2f of %.2f GB, %.3f GB/s, %s"
                % (done / 1e9, total / 1e9, rate / 1e9, left)
            )
        else:
            unpacked = len(self.complete.intersection(lacking))
            say("image: all is here; Docker unpacks, %d of %d layers" % (unpacked, len(lacking)))


def pull(
    wanted: Dict[str, Any],
    port: int,
    layers: Callable[[], Dict[str, int]],
    count: Callable[[], int],
    trouble: Callable[[], Any],
) -> str:
    """Have Docker pull from our port, and give the image its name; return its id.

    layers, count: for progress. trouble: why it is to be given up, when it is. Raises ImageError.
    """
    repository = Reference.parse(wanted["image"]).repository
    name = "127.0.0.1:%d/%s@%s" % (port, repository, wanted["digest"])
    progress, complaint = Progress(layers, count), b""
    try:
        process = subprocess.Popen(
            ("docker", "pull", name),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )
    except FileNotFoundError:
        raise ImageError("there is no docker command on this host: install Docker") from None
    assert process.stdout is not None and process.stderr is not None
    out, err = process.stdout, process.stderr

    def listen() -> None:
        for line in out:
            progress.hear(line.decode(errors="replace").strip())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    complaints: List[bytes] = []
    other = threading.Thread(target=lambda: complaints.append(err.read()), daemon=True)
    other.start()
    try:
        while process.poll() is None:
            stay()
            reason = trouble()
            if reason:
                raise ImageError(str(reason))
            progress.tell()
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            process.terminate()  # the engine ends the pull when its client goes
            process.wait()
    other.join(5)
    complaint = b"".join(complaints)
    if process.returncode:
        # The reason may be on its way from the head: Docker heard it first.
        wait_until(lambda: bool(trouble()), 1)
        raise ImageError(str(trouble() or explained(complaint)))
    try:
        docker("tag", name, wanted["tag"])
        image = json.loads(docker("image", "inspect", "--format", "{{json .}}", wanted["tag"]))
    finally:
        with contextlib.suppress(ImageError):
            docker("rmi", name)
    forget_leftovers(image, wanted, repository)
    return str(image["Id"])


def forget_leftovers(image: Dict[str, Any], wanted: Dict[str, Any], repository: str) -> None:
    """Remove temporary names that killed runs have left on the image."""
    real = [Reference.parse(wanted[key]).host for key in ("image", "tag")]
    for name in image.get("RepoDigests") or []:
        is_ours = re.match(r"127\.0\.0\.1:\d+/" + re.escape(repository) + "@", name)
        if is_ours and Reference.parse(name).host not in real:
            with contextlib.suppress(ImageError):
                docker("rmi", name)


def explained(complaint: bytes) -> str:
    """What docker pull's complaint means, and what to do."""
    text = last_line(complaint)
    if "no space left on device" in text:
        return (
            "the disk of this host's Docker became full (%s): make room there; docker system df "
            "shows what uses it, and the next run goes on" % text
        )
    if "verification failed" in text or "unexpected commit digest" in text:
        return (
            "what arrived is not what was sent (%s): Docker refused it. A fault of the network, or "
            "of the memory of either host; run it again" % text
        )
    if "Cannot connect to the Docker daemon" in text or "permission denied" in text:
        return "Docker does not answer on this host: %s" % text
    if "no matching manifest" in text:
        return "the image is not made for this host's architecture: %s" % text
    return "docker pull failed: %s; run it again" % text


# A worker.


class Forwarder:
    """Listens on 127.0.0.1 and passes what comes from this host's Docker on to the head."""

    def __init__(self, wanted: Dict[str, Any]) -> None:
        self.wanted = wanted
        self.sender = "%s at %s" % (wanted["sender"], wanted["address"])
        self.stall = wanted.get("stall", 20)
        self.fabric_port = 0
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
        """Find the head, and listen; raises ImageError."""
        control = self.dial(CONTROL, self.wanted.get("patience", 60))
        control.peer.settimeout(self.stall)
        server = socket.socket()
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        self.open.append(server)
        self.port = int(server.getsockname()[1])
        threading.Thread(target=accept, args=(server, self.forward), daemon=True).start()
        self.conversation = threading.Thread(target=self.converse, args=(control,), daemon=True)
        self.conversation.start()

    def dial(self, kind: int, patience: float) -> Wire:
        """Connect, and prove each other; raises ImageError when patience is over."""
        until = time.monotonic() + patience
        while True:
            reasons = []
            for port in [self.fabric_port] if self.fabric_port else self.wanted["ports"]:
                try:
                    wire = self.try_port(port, kind)
                except EOFError:
                    reasons.append("port %d: what listens there does not let us in" % port)
                except OSError as error:
                    if error.errno == errno.EADDRNOTAVAIL:
                        raise ImageError(
                            "this host has no address %s: check its fabric address and interface"
                            % self.wanted["source"]
                        ) from None
                    reasons.append("port %d: %s" % (port, why(error)))
                else:
                    self.fabric_port = port
                    self.open.append(wire.peer)
                    return wire
            if time.monotonic() > until:
                raise ImageError(
                    "cannot reach %s from %s: %s"
                    % (self.sender, self.wanted["source"], "; ".join(reasons))
                )
            stay()
            time.sleep(0.1)

    def try_port(self, port: int, kind: int) -> Wire:
        """Connect; raises EOFError when it is not our head that listens there."""
        place = (self.wanted["address"], port)
        peer = socket.create_connection(place, GREETING_SECONDS, (self.wanted["source"], 0))
        wire = Wire(peer)
        try:
            greeting = wire.read(len(GREETING) + NONCE)
            nonce = secrets.token_bytes(NONCE)
            who = struct.pack(">HH", self.wanted["index"], kind)
            wire.nonces = greeting[len(GREETING) :] + nonce
            peer.sendall(nonce + who + wire.sign(b"receive" + who))
            if not hmac.compare_digest(wire.read(PROOF), wire.sign(b"send" + who)):
                raise EOFError
            peer.settimeout(None)
            return wire
        except BaseException:
            peer.close()
            raise

    def converse(self, control: Wire) -> None:
        """Exchange signs of life and news with the head until it has our last word."""
        try:
            while True:
                news = self.news
                control.send(news)
                answer = control.receive()
                self.layers, self.is_ready = answer["layers"], answer["ready"]
                if answer["error"]:
                    self.error = self.error or "%s: %s" % (self.wanted["sender"], answer["error"])
                if news["state"] != "running":
                    break
                self.has_last_word.wait(0.25)
        except (socket.timeout, BlockingIOError):
            self.error = self.error or (
                "nothing came from %s for %d s: the link is cut, or the host is down; run it again "
                "when it is back" % (self.sender, self.stall)
            )
        except (OSError, EOFError, ValueError, KeyError):
            self.error = self.error or (
                "%s ended the connection: its program was stopped or died; run it again"
                % self.sender
            )

    def tell(self, state: str, reason: str) -> None:
        """Give the head our last word, if it still listens."""
        self.news = {"state": state, "reason": reason}
        self.has_last_word.set()
        if self.conversation is not None:
            self.conversation.join(GREETING_SECONDS)

    def forward(self, docker: socket.socket) -> None:
        """Join a connection of Docker with one to the head until either ends."""
        if not may_use(docker):
            return
        try:
            head = self.dial(DATA, 0).peer
        except ImageError:
            return
        self.open.append(docker)
        upwards = threading.Thread(target=self.pump, args=(docker, head, False), daemon=True)
        upwards.start()
        self.pump(head, docker, True)
        hang_up(head)

    def pump(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        """Copy until the source ends."""
        buffer = memoryview(bytearray(BUFFER if is_counted else 16 << 10))
        with contextlib.suppress(OSError):
            while True:
                count = source.recv_into(buffer)
                if not count:
                    break
                target.sendall(buffer[:count])
                if is_counted:
                    with self.lock:
                        self.received += count
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Leave no socket behind."""
        for each in self.open:
            hang_up(each)


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
    except ImageError as error:
        reason = str(error)
        raise
    finally:
        forwarder.tell(state, reason)
        forwarder.close()
    return {"digest": wanted["digest"], "id": image_id, "received": forwarder.received}


ROLES: Dict[str, Callable[[Dict[str, Any]], Dict[str, Any]]] = {
    "resolve": resolve,
    "serve": serve,
    "receive": receive,
}


@contextlib.contextmanager
def orderly() -> Iterator[None]:
    """Have signals end this program through every `finally`."""

    def stop(number: int, frame: Any) -> None:  # noqa: ARG001
        raise ImageError("stopped by signal %d" % number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stop)
    yield
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def status(key: str) -> int:
    """A size from /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def main(wanted: Dict[str, Any]) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    began = time.monotonic()
    try:
        if wanted["role"] in ("serve", "receive") and not TOKEN:
            raise ImageError("this program was started without a token: see keyed()")
        with orderly():
            found = ROLES[wanted["role"]](wanted)
    except ImageError as error:
        found = {"error": str(error)}
    if "error" in found:
        print(found["error"], file=sys.stderr, flush=True)
    found["seconds"] = round(time.monotonic() - began, 3)
    found["cpu_seconds"] = round(time.process_time(), 3)
    found["peak_bytes"] = status("VmHWM")
    if wanted.get("result", True):
        try:
            say(json.dumps(found))
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains once more at its end
    return 1 if "error" in found else 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[2])))
