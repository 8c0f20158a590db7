"""The transfer engine, for real: its programs as a host starts them, over loopback addresses."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster.encryption import certificate
from cluster.programs import source as source_text
from cluster.remote import wire
from cluster.remote.relay import sender as sending
from cluster.remote.relay.manifest import PIECE, Manifest
from cluster.remote.relay.tree import Tree, is_part
from cluster.remote.wire import TransferError
from tests import started
from tests.started import HEAD, MIB, SECRETS, Ended, end, free_port, proxy, start, wait_for

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")


def role(name: str, root: Path, **keys: Any) -> Ended:
    return end(start("relay", {"role": name, "root": str(root), **keys}))


@dataclass
class Transfer:
    """A sender and its receivers."""

    source: Path
    targets: list[Path]
    secrets: dict[str, str] = field(default_factory=lambda: dict(SECRETS))
    keys: dict[str, Any] = field(default_factory=dict)
    """For both sides."""
    ports: list[int] = field(default_factory=lambda: [free_port()])
    digest: str = ""

    def __post_init__(self) -> None:
        self.keys = {"patience": 10, "stall": 5, **self.keys}
        self.digest = self.digest or role("manifest", self.source).result["digest"]
        self.receivers = [
            {"name": f"spark-{n}", "address": f"127.0.0.{n}"}
            for n, _ in enumerate(self.targets, start=2)
        ]

    def send(self, **keys: Any) -> subprocess.Popen[str]:
        wanted = {
            **{"role": "send", "root": str(self.source), "digest": self.digest, "address": HEAD},
            **{"ports": self.ports, "receivers": self.receivers, **self.keys, **keys},
        }
        return start("relay", wanted, self.secrets)

    def receive(
        self, index: int = 0, secrets: dict[str, str] | None = None, **keys: Any
    ) -> subprocess.Popen[str]:
        own = self.receivers[index]
        wanted = {
            **{"role": "receive", "root": str(self.targets[index]), "index": index},
            **{"name": own["name"], "source": own["address"], "sender": "spark-1"},
            **{"address": HEAD, "ports": self.ports, **self.keys, **keys},
        }
        return start("relay", wanted, secrets or self.secrets)

    def run(self, **keys: Any) -> tuple[Ended, list[Ended]]:
        """Start all, wait for all; `keys` are for the receivers."""
        sender = self.send()
        receivers = [self.receive(index, **keys) for index in range(len(self.targets))]
        ended = [end(each) for each in receivers]
        return end(sender), ended


def transfer(source: Path, *targets: Path, **keys: Any) -> list[Ended]:
    """Run one that has to succeed; what its receivers said."""
    sent, received = Transfer(source, list(targets)).run(**keys)
    assert (sent.code, sent.err) == (0, "")
    assert [(each.code, each.err) for each in received] == [(0, "")] * len(targets)
    return received


def tree(root: Path) -> dict[str, tuple[Any, ...]]:
    """Everything below a directory: link targets, or mode, mtime and content."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in root.rglob("*"):
        info = path.lstat()
        name = str(path.relative_to(root))
        if stat.S_ISLNK(info.st_mode):
            found[name] = (str(path.readlink()),)
        elif stat.S_ISREG(info.st_mode):
            found[name] = (stat.S_IMODE(info.st_mode), info.st_mtime_ns, path.read_bytes())
    return found


def finals(root: Path) -> set[str]:
    """Names of whole files."""
    return {name for name in tree(root) if not is_part(name)}


def write(path: Path, size: int, seed: bytes = b"") -> Path:
    """A file of random bytes, with an old mtime."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(seed or os.urandom(size))
    os.utime(path, ns=(1_600_000_000_123_456_789, 1_600_000_000_123_456_789))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small model: two shards, one larger than a piece, a few small files."""
    root = tmp_path / "source"
    write(root / "a.safetensors", PIECE + MIB)
    write(root / "b.safetensors", 3 * MIB)
    write(root / "config.json", 700)
    return root


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


def test_everything_arrives_on_two_hosts_whatever_its_name(tmp_path: Path) -> None:
    source = tmp_path / "so urce"
    names = [b"a b", b"quo'te\"s", b"new\nline", "umläut-模型".encode(), b"not-utf8-\xff\xfe"]
    names += [b"-rf", b"$(touch x)", b"%s", b"." * 3, b"n" * 255, b"deep/er/\xe9/x", b"empty"]
    for name in names:
        path = source / os.fsdecode(name)
        write(path, 0 if name == b"empty" else 1000)
    (source / "empty").chmod(0o755)
    write(source / "exactly", PIECE)
    write(source / "one more", PIECE + 1)
    (source / "link").symlink_to("deep/er")
    (source / "deep" / "up").symlink_to("../one more")
    targets = [tmp_path / "1", tmp_path / "2"]
    received = transfer(source, *targets)
    assert tree(targets[0]) == tree(source)
    assert tree(targets[1]) == tree(source)
    assert received[0].result["received"] == sum(
        each.stat().st_size
        for each in source.rglob("*")
        if each.is_file() and not each.is_symlink()
    )
    assert role("check", targets[0], verify=True).result["state"] == "ok"


def test_nothing_to_do_sends_nothing_and_reads_nothing(source: Path, target: Path) -> None:
    transfer(source, target)
    again = role("manifest", source).result
    assert again["hashed"] == 0
    checked = role("check", target, digest=again["digest"]).result
    assert (checked["state"], checked["hashed"]) == ("ok", 0)
    (received,) = transfer(source, target)
    assert received.result["received"] == 0
    assert received.result["kept"] == again["bytes"]


def test_only_what_differs_travels(source: Path, target: Path) -> None:
    transfer(source, target)
    write(source / "config.json", 700)
    (target / "b.safetensors").write_bytes(b"short")
    stale = role("check", target, digest=role("manifest", source).result["digest"]).result
    assert stale["state"] == "stale"
    found = role("check", target).result
    assert found["state"] == "different"
    assert found["different"] == {"count": 1, "names": ["b.safetensors"]}
    # The same size and mtime: config.json has another content all the same, and is hashed for it.
    os.utime(target / "config.json")
    (received,) = transfer(source, target)
    assert received.result["received"] == 700 + 3 * MIB
    assert tree(target) == tree(source)


def test_a_copy_made_by_hand_is_taken_over(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    assert role("check", target).result["state"] == "none"
    (received,) = transfer(source, target)
    assert received.result["received"] == 0
    assert tree(target) == tree(source)


def test_a_missing_shard_is_named(source: Path, target: Path) -> None:
    transfer(source, target)
    (target / "a.safetensors").unlink()
    found = role("check", target).result
    assert (found["state"], found["missing"]["names"]) == ("different", ["a.safetensors"])


def test_verify_finds_and_repairs_a_flipped_bit(source: Path, target: Path) -> None:
    transfer(source, target)
    shard, before = target / "b.safetensors", (target / "b.safetensors").stat()
    content = bytearray(shard.read_bytes())
    content[MIB] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert role("check", target).result["state"] == "ok"
    assert role("check", target, verify=True).result["different"]["names"] == ["b.safetensors"]
    transfer(source, target, verify=True)
    assert role("check", target, verify=True).result["state"] == "ok"


def test_a_change_with_the_old_mtime_is_noticed_at_the_source(source: Path) -> None:
    before = role("manifest", source).result
    shard = source / "b.safetensors"
    info, content = shard.stat(), bytearray(shard.read_bytes())
    content[0] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(info.st_atime_ns, info.st_mtime_ns))
    after = role("manifest", source).result
    assert after["digest"] != before["digest"]
    assert after["hashed"] == 3 * MIB


def test_files_that_are_gone_are_reported_and_removed_only_on_demand(
    source: Path, target: Path
) -> None:
    transfer(source, target)
    write(target / "old" / "gone.bin", 10)
    write(target / ".x.relay.part", 10)
    (received,) = transfer(source, target)
    assert received.result["extra"] == {"count": 1, "names": ["old/gone.bin"]}
    assert received.result["deleted"] == 0
    assert not (target / ".x.relay.part").exists()
    (received,) = transfer(source, target, delete=True)
    assert received.result["deleted"] == 1
    assert tree(target) == tree(source)
    assert not (target / "old").exists()


def hub_cache(root: Path) -> None:
    for commit, blob in (("1111", "aaaa"), ("2222", "bbbb")):
        write(root / "blobs" / blob, 1000)
        (root / "snapshots" / commit).mkdir(parents=True)
        (root / "snapshots" / commit / "x").symlink_to(f"../../blobs/{blob}")
    write(root / "blobs" / "cccc.incomplete", 1000)
    write(root / "refs" / "main", 0, b"2222")


def test_one_revision_of_a_hub_cache_travels_with_its_blobs(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    hub_cache(source)
    role("manifest", source, only=["refs", "snapshots/2222"])
    digest = role("manifest", source, only=["refs", "snapshots/2222"]).result["digest"]
    _, (received,) = Transfer(source, [target], digest=digest).run()
    assert received.code == 0
    assert finals(target) == {"refs/main", "snapshots/2222/x", "blobs/bbbb"}
    assert (target / "snapshots/2222/x").is_symlink()
    result = role("manifest", source, exclude=["*.incomplete"]).result
    assert (result["files"], result["links"]) == (3, 2)


def test_a_link_that_leads_out_travels_as_the_file(tmp_path: Path) -> None:
    root, target = tmp_path / "source", tmp_path / "target"
    hub_cache(root)
    snapshot = root / "snapshots" / "2222"
    transfer(snapshot, target)
    assert (target / "x").read_bytes() == (root / "blobs/bbbb").read_bytes()
    assert not (target / "x").is_symlink()
    # One that is absolute and stays inside becomes relative.
    (snapshot / "absolute").symlink_to(root / "refs" / "main")
    transfer(root, tmp_path / "whole")
    assert str((tmp_path / "whole/snapshots/2222/absolute").readlink()) == "../../refs/main"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.symlink_to("../nowhere"), "which cannot be read"),
        (lambda path: path.symlink_to("/etc"), "outside of"),
        (lambda path: path.symlink_to(path.name), "which cannot be read"),
        (lambda path: os.mkfifo(path), "is no file, directory or link"),
    ],
)
def test_what_cannot_travel_is_named(source: Path, make: Callable[[Path], None], says: str) -> None:
    make(source / "od d")
    ended = role("manifest", source)
    assert ended.code == 1
    assert says in ended.err
    assert f"{source}/od d" in ended.err
    assert ended.result["error"] == ended.err.strip()


def test_a_sparse_file_costs_neither_time_nor_network_nor_disk(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    size, middle = 5_000_000_005, 2_500_000_000
    source.mkdir()
    with (source / "sparse").open("wb") as file:
        file.seek(middle)
        file.write(b"data")
        file.truncate(size)
    with (source / "hole").open("wb") as file:
        file.truncate(40 * MIB)
    assert role("manifest", source).result["seconds"] < 1
    (received,) = transfer(source, target)
    assert received.result["received"] <= PIECE
    info = (target / "sparse").stat()
    assert info.st_size == size
    assert info.st_blocks * 512 <= PIECE
    assert (target / "hole").stat().st_blocks == 0
    with (target / "sparse").open("rb") as file:
        file.seek(middle - 2)
        assert file.read(8) == b"\0\0data\0\0"


def test_many_small_files(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for number in range(2000):
        write(source / str(number % 20) / str(number), number % 3000)
    (received,) = transfer(source, target)
    assert tree(target) == tree(source)
    # No line per file; memory stays small.
    assert len(received.out.splitlines()) < 10
    assert received.result["peak_bytes"] < 64 * MIB


def test_two_transfers_at_once_with_the_same_ports(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    running = []
    for name in ("one", "two"):
        write(tmp_path / name / "source" / name, 20 * MIB)
        each = Transfer(
            tmp_path / name / "source", [tmp_path / name / "target"], {"token": name}, ports=ports
        )
        running += [each.receive(), each.send()]
    ended = [end(each) for each in running]
    assert [(each.code, each.err) for each in ended] == [(0, "")] * 4
    for name in ("one", "two"):
        assert tree(tmp_path / name / "target") == tree(tmp_path / name / "source")


def test_two_transfers_into_one_directory(source: Path, target: Path) -> None:
    first = Transfer(source, [target])
    running = first.receive()  # without a sender: it waits, and has the directory
    wait_for(target.exists)
    time.sleep(0.3)
    ended = end(Transfer(source, [target], digest=first.digest).receive())
    running.kill()
    running.communicate()
    assert ended.code == 1
    assert "another transfer is writing to" in ended.err


def test_receivers_share_one_read_of_the_disk(tmp_path: Path) -> None:
    source = tmp_path / "source"
    size = 6 * PIECE
    write(source / "a", size // 2)
    write(source / "b", size // 2)
    each = Transfer(source, [tmp_path / str(n) for n in range(3)], keys={"drop_cache": True})
    subprocess.run(["sync", "-f", source], check=True)
    if not drops(tmp_path):
        pytest.skip("this file system keeps its pages")
    assert cached(source / "a") > 0
    dropped = role("drop", source).result
    assert (dropped["files"], dropped["bytes"]) == (2, size)
    assert cached(source / "a") == 0
    sent, received = each.run()
    assert [ended.code for ended in (sent, *received)] == [0] * 4
    assert sent.result["sent"] == 3 * size
    if sent.result["read"]:
        assert sent.result["read"] < 1.3 * size
    # drop_cache: nothing of it stays in memory, on either side.
    assert cached(source / "a") + cached(tmp_path / "2" / "b") == 0


def test_the_fast_wait_for_the_slow_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    pace, passed = sending.Pace(2), threading.Event()

    def run_ahead(position: int) -> None:
        pace.reach(0, position)
        passed.set()

    threading.Thread(target=run_ahead, args=(sending.WINDOW + 1,), daemon=True).start()
    assert not passed.wait(0.2)
    pace.reach(1, 1)
    assert passed.wait(2)
    # One that gets nothing for long is not waited for, and one that has ended neither.
    monkeypatch.setattr(sending, "LAG_SECONDS", 0.2)
    passed.clear()
    threading.Thread(target=run_ahead, args=(10 * sending.WINDOW,), daemon=True).start()
    assert passed.wait(2)
    monkeypatch.setattr(sending, "LAG_SECONDS", 60)
    passed.clear()
    threading.Thread(target=run_ahead, args=(20 * sending.WINDOW,), daemon=True).start()
    assert not passed.wait(0.2)
    pace.leave(1)
    assert passed.wait(2)


def drops(folder: Path) -> bool:
    """Whether the pages of a file can be dropped there."""
    path = write(folder / "probe", MIB)
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return cached(path) == 0


def cached(path: Path) -> int:
    argv = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(path)]
    return int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout or 0)


def test_a_byte_changed_on_the_way_is_sent_again(source: Path, target: Path) -> None:
    each = Transfer(source, [target])
    spoilt = []

    def spoil(data: bytearray) -> None:
        if not spoilt:
            data[100] ^= 1
            spoilt.append(1)

    with proxy(each.ports[0]) as between:
        between.spoil = spoil
        sender, receiver = each.send(), each.receive(ports=[between.port])
        received = end(receiver)
        assert (received.code, received.err) == (0, "")
        assert received.result["resent"] in (PIECE, MIB, 3 * MIB)
        assert end(sender).code == 0
    assert tree(target) == tree(source)


def test_a_network_that_always_spoils_ends_with_the_name_of_the_file(
    source: Path, target: Path
) -> None:
    (source / "a.safetensors").unlink()
    each = Transfer(source, [target])
    with proxy(each.ports[0]) as between:
        between.spoil = lambda data: data.__setitem__(0, data[0] ^ 1)
        sender, receiver = each.send(), each.receive(ports=[between.port])
        received, sent = end(receiver), end(sender)
    assert (received.code, sent.code) == (1, 1)
    assert "'b.safetensors' arrived wrong twice" in received.err
    assert sent.err.startswith("spark-2: 'b.safetensors' arrived wrong twice")
    assert "b.safetensors" not in finals(target)


def test_a_spoilt_manifest_is_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for number in range(1500):
        write(source / str(number), 1)
    each = Transfer(source, [target])
    with proxy(each.ports[0]) as between:
        between.spoil = lambda data: data.__setitem__(-1, data[-1] ^ 1)
        sender, receiver = each.send(), each.receive(ports=[between.port])
        received, _ = end(receiver), end(sender)
    assert received.code == 1
    assert "was changed on the way" in received.err
    assert not finals(target)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Enough that a proxy can make it slow."""
    root = tmp_path / "large"
    for number in range(4):
        write(root / f"{number}.safetensors", PIECE)
    return root


@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_killed_in_the_middle_the_next_run_goes_on(large: Path, target: Path, victim: str) -> None:
    each = Transfer(large, [target], keys={"streams": 1})
    with proxy(each.ports[0], rate=100e6) as between:
        sender, receiver = each.send(), each.receive(ports=[between.port])
        wait_for(lambda: between.passed > 1.5 * PIECE)
        (sender if victim == "sender" else receiver).send_signal(signal.SIGKILL)
        sent, received = end(sender), end(receiver)
    if victim == "sender":
        assert received.code == 1
        assert "spark-1 at 127.0.0.1 ended the connection" in received.err
    else:
        assert sent.code == 1
        assert "spark-2: it ended the connection" in sent.err
    assert finals(target) == {"0.safetensors"}
    (again,) = transfer(large, target)
    assert again.result["received"] <= 3 * PIECE
    assert tree(target) == tree(large)


def test_a_partial_file_is_continued(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "source"
    write(source / "one", 4 * PIECE)
    each = Transfer(source, [target], keys={"streams": 1})
    with proxy(each.ports[0], rate=100e6) as between:
        sender, receiver = each.send(), each.receive(ports=[between.port])
        wait_for(lambda: between.passed > 2.5 * PIECE)
        sender.kill()
        end(sender), end(receiver)
    assert not finals(target)
    (again,) = transfer(source, target)
    assert again.result["received"] <= 2 * PIECE
    assert tree(target) == tree(source)


def test_a_cut_link_ends_both_sides(large: Path, target: Path) -> None:
    each = Transfer(large, [target], keys={"stall": 1})
    with proxy(each.ports[0], rate=100e6) as between:
        sender, receiver = each.send(), each.receive(ports=[between.port])
        wait_for(lambda: between.passed > PIECE // 2)
        between.is_frozen = True
        began = time.monotonic()
        received, sent = end(receiver), end(sender)
    assert time.monotonic() - began < 6
    assert (received.code, sent.code) == (1, 1)
    assert "nothing came from spark-1 at 127.0.0.1 for 1 s: the link is cut" in received.err
    assert "spark-2: no sign of life for 1 s" in sent.err
    assert "3.safetensors" not in finals(target)


@contextlib.contextmanager
def small_disk(path: Path, size: int) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@as_root
def test_a_disk_that_is_too_small_is_named_before(source: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 10 * MIB) as disk:
        each = Transfer(source, [disk / "model", tmp_path / "other"])
        sent, (received, other) = each.run()
        assert received.code == 1
        assert "20972220 bytes are needed, 10485760 are free" in received.err
        assert not finals(disk)
    # One receiver fails; the other does not.
    assert sent.code == 1
    assert sent.result["receivers"]["spark-2"]["state"] == "failed"
    assert sent.result["receivers"]["spark-3"] == {"state": "done", "reason": ""}
    assert other.code == 0
    assert tree(tmp_path / "other") == tree(source)


@as_root
def test_a_disk_that_becomes_full(large: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 80 * MIB) as disk:
        each = Transfer(large, [disk / "model"], keys={"streams": 1})
        with proxy(each.ports[0], rate=40e6) as between:
            sender, receiver = each.send(), each.receive(ports=[between.port])
            wait_for(lambda: between.passed > PIECE + MIB)
            with contextlib.suppress(OSError):
                (disk / "other").write_bytes(bytes(80 * MIB))
            received, sent = end(receiver), end(sender)
        assert received.code == 1
        assert f"the disk became full while writing to {disk}/model" in received.err
        assert f"spark-2: the disk became full while writing to {disk}/model" in sent.err
        assert not any(map(is_part, tree(disk)))
        (disk / "other").unlink()
        transfer(large, disk / "model")
        assert tree(disk / "model") == tree(large)


def test_a_stranger_gets_nothing(source: Path, target: Path) -> None:
    each = Transfer(source, [target])
    sender = each.send()
    place = (HEAD, each.ports[0])
    wait_for(lambda: not socket.socket().connect_ex(place))
    # From an address that is no receiver's.
    with socket.create_connection(place, 5, ("127.0.0.9", 0)) as peer:
        assert peer.recv(100) == b""
    # From a receiver's address, without the token.
    with socket.create_connection(place, 5, ("127.0.0.2", 0)) as peer:
        assert len(peer.recv(100)) == len(wire.GREETING) + wire.NONCE
        peer.sendall(bytes(1000))
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(100) == b""
    # More of them than may wait, all silent: the receiver comes in all the same.
    crowd = [socket.create_connection(place, 5, ("127.0.0.2", 0)) for _ in range(80)]
    wrong = each.receive(secrets={"token": "wrong"}, patience=0.2, root=str(target) + "-wrong")
    ended = end(wrong)
    assert ended.code == 1
    assert "does not let us in" in ended.err
    received = end(each.receive())
    assert (received.code, received.err) == (0, "")
    assert received.result["seconds"] < wire.GREETING_SECONDS / 2  # before they are sent away
    assert tree(target) == tree(source)
    assert end(sender).code == 0
    for peer in crowd:
        peer.close()
    # No listening socket survives it.
    assert socket.socket().connect_ex(place) != 0


ENCRYPTED = {**SECRETS, "certificate": certificate().get_secret_value()}


def test_encrypted_everything_arrives_and_nobody_can_read_it(
    source: Path, target: Path, tmp_path: Path
) -> None:
    secret = b"a line of the model that nobody else may read\n" * 40_000
    write(source / "secret.bin", 0, secret)
    heard: dict[bool, bytearray] = {}
    for is_encrypted in (False, True):
        each = Transfer(source, [tmp_path / f"{is_encrypted}"])
        each.secrets = ENCRYPTED if is_encrypted else SECRETS
        heard[is_encrypted] = bytearray()
        with proxy(each.ports[0]) as between:
            between.overhear = heard[is_encrypted].extend
            sender, receiver = each.send(), each.receive(ports=[between.port])
            received, sent = end(receiver), end(sender)
        assert [(received.code, received.err), (sent.code, sent.err)] == [(0, "")] * 2
        assert tree(each.targets[0]) == tree(source)
        assert sent.result["sent"] == len(secret) + PIECE + 4 * MIB + 700
    assert secret[:200] in heard[False]
    assert len(heard[True]) > len(secret)
    assert secret[:200] not in heard[True]


def test_the_token_alone_is_not_enough_where_it_is_encrypted(source: Path, target: Path) -> None:
    other = {**SECRETS, "certificate": certificate().get_secret_value()}
    for secrets in (SECRETS, other):
        each = Transfer(source, [target], secrets=ENCRYPTED, keys={"patience": 1})
        sender, receiver = each.send(), each.receive(secrets=secrets)
        received, sent = end(receiver), end(sender)
        assert (received.code, sent.code) == (1, 1)
        assert sent.result["sent"] == 0
        assert not finals(target)


def test_an_encrypted_transfer_that_goes_silent_ends(large: Path, target: Path) -> None:
    each = Transfer(large, [target], secrets=ENCRYPTED, keys={"stall": 1})
    with proxy(each.ports[0], rate=20e6) as between:
        sender, receiver = each.send(), each.receive(ports=[between.port])
        wait_for(lambda: between.passed > 5 * MIB)
        between.is_frozen = True
        received, sent = end(receiver), end(sender)
    assert "nothing came from spark-1 at 127.0.0.1 for 1 s" in received.err
    assert sent.err == "spark-2: no sign of life for 1 s\n"
    assert not finals(target)
    transfer(large, target)
    assert tree(target) == tree(large)


def test_a_receiver_has_its_own_address(source: Path, target: Path, tmp_path: Path) -> None:
    each = Transfer(source, [target, tmp_path / "other"])
    sender = each.send()
    wait_for(lambda: not socket.socket().connect_ex((HEAD, each.ports[0])))
    ended = end(each.receive(source="127.0.0.3", patience=0.2))
    sender.kill()
    sender.communicate()
    assert ended.code == 1
    assert "does not let us in" in ended.err


def test_a_silent_stranger_is_sent_away(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = source_text("relay").replace("GREETING_SECONDS = 5", "GREETING_SECONDS = 0.5")
    monkeypatch.setattr(started, "source", lambda program: impatient)
    each = Transfer(source, [target])
    sender = each.send()
    place = (HEAD, each.ports[0])
    wait_for(lambda: not socket.socket().connect_ex(place))
    with socket.create_connection(place, 10, ("127.0.0.2", 0)) as peer:
        assert len(peer.recv(100)) == len(wire.GREETING) + wire.NONCE
        began = time.monotonic()
        assert peer.recv(100) == b""
        assert 0.3 < time.monotonic() - began < 2
    sender.kill()
    sender.communicate()


def test_a_false_sender_is_not_believed(source: Path, target: Path) -> None:
    each = Transfer(source, [target], keys={"patience": 0.2})
    with socket.create_server((HEAD, each.ports[0])) as false:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = false.accept()
                    peer.sendall(wire.GREETING + bytes(16))
                    peer.recv(52)
                    peer.sendall(bytes(32))
                    peer.close()

        threading.Thread(target=answer, daemon=True).start()
        ended = end(each.receive())
        false.close()
    assert ended.code == 1
    assert "what listens there does not let us in" in ended.err


def test_a_receiver_that_does_not_come_stops_nobody(source: Path, tmp_path: Path) -> None:
    each = Transfer(source, [tmp_path / "1", tmp_path / "2"], keys={"patience": 1})
    sender, receiver = each.send(), each.receive(1)
    assert end(receiver).code == 0
    sent = end(sender)
    assert (sent.code, sent.err.strip()) == (1, "spark-2: did not come within 1 s")
    assert sent.result["receivers"]["spark-2"]["state"] == "absent"
    assert sent.result["seconds"] < 5
    assert tree(tmp_path / "2") == tree(source)


def test_no_sender(source: Path, target: Path) -> None:
    each = Transfer(source, [target], keys={"patience": 0.2})
    ended = end(each.receive())
    assert ended.code == 1
    assert "cannot reach the sender spark-1 at 127.0.0.1 from 127.0.0.2" in ended.err
    assert "Connection refused" in ended.err
    ended = end(each.receive(source="192.0.2.77"))
    assert "this host has no address 192.0.2.77" in ended.err
    ended = end(each.send(address="192.0.2.77"))
    assert "this host has no address 192.0.2.77: check its fabric address" in ended.err


@pytest.mark.parametrize("change", ["truncate", "touch", "remove"])
def test_a_source_that_changed_since_its_manifest(source: Path, target: Path, change: str) -> None:
    each = Transfer(source, [target], keys={"patience": 0.2})
    shard = source / "b.safetensors"
    if change == "truncate":
        os.truncate(shard, 1000)
    elif change == "touch":
        shard.touch()
    else:
        shard.unlink()
    sent, (received,) = each.run()
    assert (sent.code, received.code) == (1, 1)
    assert sent.err.strip() == f"'{shard}' changed after its manifest was made: run it again"
    assert "cannot reach the sender" in received.err  # it did not even begin
    assert not finals(target)


def test_a_manifest_of_another_day(source: Path, target: Path) -> None:
    role("manifest", source)
    each = Transfer(source, [target], digest="0" * 64)
    ended = end(each.send())
    assert ended.code == 1
    assert "is not the manifest that this transfer was planned with" in ended.err


@pytest.mark.parametrize("change", ["truncate", "write"])
def test_a_source_that_changes_while_it_is_copied(large: Path, target: Path, change: str) -> None:
    each = Transfer(large, [target], keys={"streams": 1})
    with proxy(each.ports[0], rate=100e6) as between:
        sender, receiver = each.send(), each.receive(ports=[between.port])
        wait_for(lambda: between.passed > PIECE // 4)
        last = large / "3.safetensors"
        if change == "truncate":
            os.truncate(last, 5 * MIB)
        else:
            last.write_bytes(os.urandom(PIECE))
        received, sent = end(receiver), end(sender)
    assert (received.code, sent.code) == (1, 1)
    assert "'3.safetensors' changed on spark-1 after its manifest was made" in received.err
    assert f"'{last}' changed after its manifest was made: run it again" in sent.err
    assert "3.safetensors" not in finals(target)
    transfer(large, target)
    assert tree(target) == tree(large)


def test_a_link_at_the_receiver_is_not_written_through(
    source: Path, target: Path, tmp_path: Path
) -> None:
    write(source / "sub" / "file", 100)
    outside = tmp_path / "outside"
    outside.mkdir()
    target.mkdir()
    (target / "sub").symlink_to(outside)
    (target / "config.json").symlink_to(outside / "config.json")
    sent, (received,) = Transfer(source, [target]).run()
    assert (sent.code, received.code) == (1, 1)
    assert f"'{target}/sub" in received.err
    assert "links are not written through" in received.err
    assert not list(outside.iterdir())
    (target / "sub").unlink()
    transfer(source, target)  # a link in the place of a file is replaced
    assert tree(target) == tree(source)
    assert not list(outside.iterdir())


def test_a_directory_where_a_file_belongs(source: Path, target: Path) -> None:
    (target / "config.json").mkdir(parents=True)
    _, (received,) = Transfer(source, [target]).run()
    assert received.code == 1
    assert f"'{target}/config.json' is a directory where a file belongs" in received.err


ROW = ["x", "file", 1, 0, 0o644, "0" * 64, ""]


@pytest.mark.parametrize(
    "row",
    [
        ["../x", *ROW[1:]],
        ["a/../../x", *ROW[1:]],
        ["/etc/x", *ROW[1:]],
        ["a//x", *ROW[1:]],
        ["", *ROW[1:]],
        ["a\0b", *ROW[1:]],
        ["x", "device", *ROW[2:]],
        ["x", "file", -1, *ROW[3:]],
        ["x", "file", 1, 0, 0o644, "", ""],
        ["x", "symlink", 0, 0, 0, "", "../y"],
        ["a/x", "symlink", 0, 0, 0, "", "../../y"],
        ["a/x", "symlink", 0, 0, 0, "", "b/../../../y"],
        ["x", "symlink", 0, 0, 0, "", "/etc/passwd"],
        ["x", "symlink", 0, 0, 0, "", ""],
    ],
)
def test_a_manifest_that_leads_out_is_refused(row: list[Any]) -> None:
    Manifest.parse([ROW, ["a/x", "symlink", 0, 0, 0, "", "../y"]])
    with pytest.raises(TransferError, match="leads out"):
        Manifest.parse([row])


def test_a_path_is_walked_without_links(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "out").symlink_to(tmp_path)
    with pytest.raises(TransferError, match="is in the way"):
        Tree(str(tmp_path / "root")).open("out/file", os.O_RDWR | os.O_CREAT, make=True)
    assert not (tmp_path / "file").exists()


def test_progress_says_rate_and_time_left(large: Path, target: Path) -> None:
    each = Transfer(large, [target])
    with proxy(each.ports[0], rate=20e6) as between:
        sender, receiver = each.send(), each.receive(ports=[between.port])
        received, sent = end(receiver), end(sender)
    lines = received.out.splitlines()[:-1]
    assert lines
    assert all(line.startswith("receiving: ") for line in lines)
    assert "of 0.07 GB, 0.0" in lines[0]
    assert lines[0].endswith("s left")
    assert len(lines) <= received.result["seconds"] / 2 + 1
    assert sent.out.startswith("sending: ")


def test_a_program_without_token_does_nothing(source: Path, target: Path) -> None:
    each = Transfer(source, [target], keys={"patience": 1})
    each.secrets = {}
    ended = end(each.send())
    assert ended.code == 1
    assert "without a token" in ended.err


def test_the_manifest_has_a_place_of_its_own_and_the_result_can_be_left_out(
    source: Path, tmp_path: Path
) -> None:
    place = tmp_path / "new" / "place.json"
    ended = role("manifest", source, manifest=str(place), result=False)
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    assert role("manifest", source, manifest=str(place)).result["hashed"] == 0
