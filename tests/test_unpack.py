"""A model from a tar archive: the program as a host starts it, with the real tar."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from tests.started import Ended, end, start

NAMES = ["config.json", "a b.safetensors", "quo'te\".txt", "new\nline", "ünï", "-rf", "sub/deep"]


class Head:
    """A head with an archive and a root."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "models" / "big"
        self.archive = self.root / ".arriving" / "archive"
        self.record = folder / "relay" / "big.archive"

    @property
    def wanted(self) -> dict[str, str]:
        return {
            **{"role": "unpack", "archive": str(self.archive), "root": str(self.root)},
            **{"record": str(self.record), "identity": "big.tar 1 2"},
        }

    def unpack(self, packed: bytes) -> Ended:
        self.archive.parent.mkdir(parents=True, exist_ok=True)
        self.archive.write_bytes(packed)
        return end(start("unpack", self.wanted))

    @property
    def state(self) -> str:
        """The archive that was unpacked last."""
        ended = end(start("unpack", {"role": "state", "record": str(self.record)}))
        return str(ended.result["archive"])

    @property
    def files(self) -> dict[str, bytes]:
        """Everything in the root."""
        paths = (path for path in self.root.rglob("*") if path.is_file() or path.is_symlink())
        return {str(path.relative_to(self.root)): path.read_bytes() for path in paths}


@pytest.fixture
def head(tmp_path: Path) -> Head:
    return Head(tmp_path)


def packed(members: dict[str, bytes], mode: str = "w") -> bytes:
    """A tar archive; a name that ends in @ is a symlink to its content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name.rstrip("@"))
            member.mtime = 1_600_000_000
            if name.endswith("@"):
                member.type, member.linkname = tarfile.SYMTYPE, content.decode()
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


MODEL = {name: os.urandom(1000) for name in NAMES}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "zstd"])
@pytest.mark.parametrize("top", ["", "./", "big-model/"])
def test_everything_is_there(head: Head, mode: str, top: str) -> None:
    content = packed({top + name: data for name, data in MODEL.items()}, mode.replace("zstd", "w"))
    if mode == "zstd":
        if not shutil.which("zstd"):
            pytest.skip("there is no zstd here")
        content = subprocess.run(["zstd", "-c"], input=content, capture_output=True).stdout
    assert head.state == ""
    ended = head.unpack(content)
    assert (ended.code, ended.err) == (0, "")
    assert head.files == MODEL
    assert (ended.result["files"], ended.result["bytes"]) == (len(MODEL), 1000 * len(MODEL))
    assert (head.root / "config.json").stat().st_mtime == 1_600_000_000
    assert head.state == "big.tar 1 2"


def test_links_stay_links(head: Head) -> None:
    head.unpack(packed({**MODEL, "sub/link@": b"../config.json"}))
    assert str((head.root / "sub/link").readlink()) == "../config.json"


def test_a_newer_archive_replaces_its_files_and_no_others(head: Head) -> None:
    head.unpack(packed(MODEL))
    (head.root / "notes.txt").write_text("mine")
    newer = {**MODEL, "config.json": b"{}"}
    assert head.unpack(packed(newer)).code == 0
    assert head.files == {**newer, "notes.txt": b"mine"}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (packed(MODEL)[:5000], "the archive is damaged, not complete"),
        (b"no archive at all" * 1000, "the archive is damaged, not complete"),
        (packed({"weights.bin": b"w"}), "no config.json at its top"),
        (packed({}), "At its top: nothing"),
    ],
)
def test_a_useless_archive_is_named_and_leaves_nothing(
    head: Head, content: bytes, why: str
) -> None:
    ended = head.unpack(content)
    assert ended.code == 1
    assert why in ended.err
    assert "Traceback" not in ended.err
    assert head.files == {}
    assert head.state == ""
    assert head.unpack(packed(MODEL)).code == 0


def test_nothing_is_written_elsewhere(head: Head, tmp_path: Path) -> None:
    members = {**MODEL, "../../../escaped": b"x", f"{tmp_path}/absolute": b"x"}
    head.unpack(packed(members))
    assert not (tmp_path / "escaped").exists()
    assert not (tmp_path / "absolute").exists()


def test_a_killed_one_is_finished_by_the_next(head: Head) -> None:
    content = packed({**MODEL, "huge": bytes(200_000_000)})
    head.archive.parent.mkdir(parents=True)
    head.archive.write_bytes(content)
    process = start("unpack", head.wanted)
    until = time.monotonic() + 10
    while not (head.archive.parent / "content").exists():
        assert time.monotonic() < until
        time.sleep(0.001)
    process.kill()
    process.communicate()
    assert set(head.files) <= {".arriving/archive", *(f".arriving/content/{n}" for n in NAMES)} | {
        ".arriving/content/huge"
    }
    assert end(start("unpack", head.wanted)).code == 0
    assert set(head.files) == {*NAMES, "huge"}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")
def test_a_full_disk(head: Head) -> None:
    head.root.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(head.root)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount here")
    try:
        ended = head.unpack(packed({**MODEL, "large": bytes(2_000_000)}))
        assert ended.code == 1
        assert "the disk became full while unpacking" in ended.err
        assert set(head.files) == {".arriving/archive"}
    finally:
        subprocess.run(["umount", str(head.root)], check=True)
