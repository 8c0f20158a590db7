"""What the head gives: an image, its manifests and blobs, wherever they come from."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import subprocess
import threading
from typing import Any, Dict, List, NamedTuple, Tuple

from cluster.remote.wire import TransferError, why

CACHE = "/var/tmp/vllm-image"  # noqa: S108 -- of mode 0700, and refused where it is not ours
DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
INDEXES = (
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.index.v1+json",
)
MANIFEST_BYTES = 4 << 20
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
OURS = re.compile(r"(?:[0-9a-f]{64}|archive-[0-9a-f]{32}\.tar|saved\.tar\.[0-9a-f]{64})(?:\.part)?")
"""Names of files in the cache."""


class ImageError(TransferError):
    """What goes wrong with an image. status: in HTTP's terms."""

    def __init__(self, reason: str, status: int = 502) -> None:
        super().__init__(reason)
        self.status = status


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
        self.error: TransferError | None = None
        """Why no receiver can succeed any more."""
        self.lock = threading.RLock()

    def resolve(self) -> str:
        """The digest that the reference means now. Raises ImageError."""
        raise NotImplementedError

    def prepare(self, digest: str) -> None:
        """Have the manifest of this digest. Raises ImageError."""
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


def size_of(folder: str) -> int:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sum(each.stat().st_size for each in entries)
    return 0
