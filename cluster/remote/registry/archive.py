"""An image from a `docker save` file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import tarfile
from typing import Any, Dict, List, Tuple

from cluster.remote.registry.source import (
    MANIFEST_BYTES,
    Blob,
    ImageError,
    Reference,
    Source,
    last_line,
)
from cluster.remote.wire import say, why

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
LAYER_TYPES = (
    (b"\x1f\x8b", "application/vnd.docker.image.rootfs.diff.tar.gzip"),
    (b"\x28\xb5\x2f\xfd", "application/vnd.oci.image.layer.v1.tar+zstd"),
    (b"", "application/vnd.docker.image.rootfs.diff.tar"),
)
"""By the first bytes of a layer."""
UNPACKERS = ((b"\x1f\x8b", "gzip"), (b"\xfd7zXZ", "xz"), (b"\x28\xb5\x2f\xfd", "zstd"))
"""What unpacks an archive, by its first bytes."""


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

    def prepare(self, digest: str) -> None:
        """Read it again; raises ImageError if it is another one now."""
        if self.resolve() != digest:
            raise ImageError("the archive has changed meanwhile: run it again")

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


def docker_save(image: str, path: str) -> None:
    say("taking the image out of this host's Docker")
    done = subprocess.run(("docker", "save", "-o", path + ".part", image), stdout=-1, stderr=-1)
    if done.returncode:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + ".part")
        raise ImageError("docker save %s: %s" % (image, last_line(done.stderr)))
    os.rename(path + ".part", path)
