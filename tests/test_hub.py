"""The download of a model, with the real huggingface_hub against a hub on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from cluster.remote.hub import LARGE, START, first_line
from tests.fake_hub import Hub, running

pytest.importorskip("huggingface_hub")

NAME = "someone/tiny"
BIG = LARGE * 4
"""Bytes of a shard: fetched with resume."""


def shard(seed: int, size: int = BIG) -> bytes:
    """A safetensors file: the length of its header, the header, one tensor."""
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    return struct.pack("<Q", len(header)) + header.encode() + random.Random(seed).randbytes(size)


FILES = {
    "config.json": b'{"architectures": ["Tiny"]}',
    "tokenizer [1].json": b"{}",
    "model-00001-of-00002.safetensors": shard(1),
    "model-00002-of-00002.safetensors": shard(2),
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    ).encode(),
    "empty.txt": b"",
    "pytorch_model.bin": b"b" * BIG,
    "original/consolidated.00.pth": b"p" * BIG,
    "onnx/model.onnx": b"o" * 100,
}
SKIPPED = {"pytorch_model.bin", "original/consolidated.00.pth", "onnx/model.onnx"}
TAKEN = {path: data for path, data in FILES.items() if path not in SKIPPED}


@dataclass
class Result:
    code: int
    answer: dict[str, Any]
    lines: list[str]
    complaint: str


@dataclass
class Place:
    """The cache, and the hub to fill it from."""

    hub: Hub
    cache: Path

    def environment(self, **more: str) -> dict[str, str]:
        kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
        return {**kept, "HF_HOME": str(self.cache.parent / "home"), **more}

    def argv(self, **wanted: Any) -> list[str]:
        argument = {"repository": NAME, "cache": str(self.cache), "endpoint": self.hub.url}
        argument |= {"pause": 0.05, "attempts": 3, **wanted}
        return [sys.executable, "-c", START, "hub", json.dumps(argument)]

    def text(self, token: str = "") -> str:
        program = files("cluster.remote").joinpath("hub.py").read_text(encoding="utf-8")
        return f"{token}\n{program}"

    def run(self, token: str = "", env: dict[str, str] | None = None, **wanted: Any) -> Result:
        """Run the program as the head's container does."""
        result = subprocess.run(
            self.argv(**wanted),
            input=self.text(token),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=self.environment(**(env or {})),
        )
        lines = result.stdout.splitlines()
        assert "Traceback" not in result.stderr, result.stderr
        assert "s1gned" not in result.stdout + result.stderr  # a signed address
        return Result(result.returncode, json.loads(lines[-1]), lines[:-1], result.stderr)

    @property
    def folder(self) -> Path:
        return self.cache / ("models--" + NAME.replace("/", "--"))

    def content(self, commit: str) -> dict[str, bytes]:
        root = self.folder / "snapshots" / commit
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in root.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with running() as hub:
        yield Place(hub, tmp_path / "hub cache")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with FILES in it."""
    cache = tmp_path_factory.mktemp("template") / "cache"
    with running() as hub:
        hub.model(NAME, FILES)
        assert Place(hub, cache).run().code == 0
    return cache


@pytest.fixture
def filled(place: Place, template: Path) -> Place:
    """A place that has FILES, and a hub that has them, too."""
    place.hub.model(NAME, FILES)
    shutil.copytree(template, place.cache, symlinks=True)
    return place


def offline(place: Place, **more: Any) -> str:
    """What vLLM gets of huggingface_hub with HF_HUB_OFFLINE=1."""
    program = (
        "import sys, json, huggingface_hub as h; "
        "print(h.snapshot_download(**json.loads(sys.argv[1])))"
    )
    wanted = {"repo_id": NAME, "cache_dir": str(place.cache), "local_files_only": True, **more}
    result = subprocess.run(
        [sys.executable, "-c", program, json.dumps(wanted)],
        capture_output=True,
        text=True,
        check=True,
        env=place.environment(HF_HUB_OFFLINE="1"),
    )
    return result.stdout.strip()


def test_a_download_and_a_second_one_that_finds_all_of_it(place: Place) -> None:
    commit = place.hub.model(NAME, FILES).refs["main"]
    result = place.run()
    assert result.code == 0, result
    total = sum(map(len, TAKEN.values()))
    seconds = result.answer.pop("seconds")
    assert 0 <= seconds < 30
    assert result.answer == {
        "commit": commit,
        "folder": str(place.folder / "snapshots" / commit),
        "bytes": total,
        "files": len(TAKEN),
        "downloaded": total,
    }
    assert place.content(commit) == TAKEN
    assert (place.folder / "refs" / "main").read_text() == commit
    assert result.lines[0].startswith(f"{NAME} {commit[:12]}: 6 of 6 files to download, ")
    assert not list(place.folder.rglob("*.incomplete"))
    assert all(path.stat().st_mode & 0o044 for path in place.folder.rglob("*"))
    links = [path for path in (place.folder / "snapshots" / commit).iterdir() if path.is_symlink()]
    assert len(links) == len(TAKEN)
    assert all((place.folder / "blobs").samefile(link.resolve().parent) for link in links)

    place.hub.requests.clear()
    again = place.run()
    assert (again.code, again.answer["downloaded"], again.lines) == (0, 0, [])
    assert [request.path for request in place.hub.requests] == [f"/api/models/{NAME}/revision/main"]


def test_a_pinned_commit_that_is_there_needs_no_hub(filled: Place) -> None:
    commit = filled.hub.models[NAME].refs["main"]
    result = filled.run(revision=commit)
    assert (result.code, result.answer["downloaded"]) == (0, 0)
    assert filled.hub.requests == []
    assert not (filled.folder / "refs" / commit).exists()


def test_vllm_finds_it_offline(filled: Place) -> None:
    commit = filled.hub.models[NAME].refs["main"]
    folder = str(filled.folder / "snapshots" / commit)
    assert offline(filled) == folder
    assert offline(filled, allow_patterns=["*.safetensors"]) == folder
    assert offline(filled, revision=commit, ignore_patterns="*") == folder


def test_a_branch_that_moved_brings_only_what_is_new(filled: Place) -> None:
    model = filled.hub.models[NAME]
    first = model.refs["main"]
    changed = {**FILES, "config.json": b'{"architectures": ["Tiny"], "v": 2}'}
    second = model.commit(changed)
    filled.hub.requests.clear()
    result = filled.run()
    assert result.answer["commit"] == second != first
    assert result.answer["downloaded"] == len(changed["config.json"])
    assert not filled.hub.downloads("safetensors")
    assert (filled.folder / "refs" / "main").read_text() == second
    assert filled.content(first) == TAKEN


def test_a_tag_and_a_pull_request(place: Place) -> None:
    model = place.hub.model(NAME, FILES)
    tag = model.commit({"config.json": b"tag"}, ref="v1.0")
    request = model.commit({"config.json": b"request"}, ref="refs/pr/7")
    assert place.run(revision="v1.0").answer["commit"] == tag
    assert place.run(revision="refs/pr/7").answer["commit"] == request
    assert (place.folder / "refs" / "refs" / "pr" / "7").read_text() == request


def test_without_safetensors_the_other_weights_come(place: Place) -> None:
    files = {"config.json": b"{}", "pytorch_model.bin": b"b", "sub/x.safetensors": b"x"}
    commit = place.hub.model(NAME, files).refs["main"]
    place.run()
    assert place.content(commit) == files


def test_patterns_of_the_user(place: Place) -> None:
    commit = place.hub.model(NAME, FILES).refs["main"]
    place.run(allow=["*.json", "*.bin"], ignore=["tokenizer*"])
    assert set(place.content(commit)) == {
        "config.json",
        "model.safetensors.index.json",
        "pytorch_model.bin",
    }
    assert "no file is left" in place.run(allow=["*.nothing"]).complaint


@pytest.mark.parametrize("cut", [LARGE + 1000, LARGE + 1001], ids=["closed", "reset"])
def test_a_broken_connection_goes_on_where_it_broke(place: Place, cut: int) -> None:
    commit = place.hub.model(NAME, FILES).refs["main"]
    name = "model-00001-of-00002.safetensors"
    place.hub.breaks[name] = [cut, cut]
    result = place.run()
    assert result.code == 0, result
    assert place.content(commit) == TAKEN
    ranges = [request.range for request in place.hub.downloads(name)]
    assert ranges[0] is None
    starts = [int(each.removeprefix("bytes=").rstrip("-")) for each in ranges[1:] if each]
    assert len(starts) == 2
    assert 0 < starts[0] < starts[1] < len(TAKEN[name])


def test_a_line_that_breaks_for_ever_ends_with_a_reason_and_the_next_run_goes_on(
    place: Place,
) -> None:
    commit = place.hub.model(NAME, FILES).refs["main"]
    name = "model-00002-of-00002.safetensors"
    place.hub.breaks[name] = [LARGE + 1] + [1] * 40
    result = place.run(attempts=2)
    assert result.code == 1
    assert "the connection broke" in result.complaint
    assert result.complaint.count("\n") == 2
    assert result.answer == {"error": result.complaint.rstrip("\n")}
    assert not (place.folder / "refs" / "main").exists()
    (partial,) = (place.folder / "blobs").glob("*.incomplete")
    begun = partial.stat().st_size
    assert 0 < begun < len(TAKEN[name])

    place.hub.breaks.clear()
    place.hub.requests.clear()
    result = place.run()
    assert result.code == 0, result
    assert [request.range for request in place.hub.downloads(name)] == [f"bytes={begun}-"]
    assert place.content(commit) == TAKEN
    assert result.answer["downloaded"] < len(TAKEN[name]) + 1000


def start(place: Place, **wanted: Any) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        place.argv(**wanted),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=place.environment(),
    )
    assert process.stdin
    process.stdin.write(place.text())
    process.stdin.close()
    return process


def test_a_run_that_is_stopped_is_continued(place: Place) -> None:
    commit = place.hub.model(NAME, FILES).refs["main"]
    name = "model-00001-of-00002.safetensors"
    place.hub.stalls[name] = LARGE * 2 + 5
    process = start(place)
    blobs, end = place.folder / "blobs", time.monotonic() + 20
    begun = f"{hashlib.sha256(FILES[name]).hexdigest()}*.incomplete"
    while time.monotonic() < end:
        if any(path.stat().st_size == LARGE * 2 for path in blobs.glob(begun)):
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM
    assert process.stderr and "what is complete is kept" in process.stderr.read()
    place.hub.stalls.clear()
    place.hub.requests.clear()
    result = place.run()
    assert result.code == 0, result
    assert place.content(commit) == TAKEN
    assert [request.range for request in place.hub.downloads(name)] == [f"bytes={LARGE * 2}-"]


def test_a_connection_on_which_nothing_comes_is_given_up(place: Place) -> None:
    place.hub.model(NAME, FILES)
    place.hub.stalls["model-00001-of-00002.safetensors"] = LARGE
    result = place.run(idle=3)
    assert result.code == 1
    assert "not one byte in 3 s, at " in result.complaint
    assert any(" MB of 8.39 MB, " in line and "/s" in line for line in result.lines)


def test_leftovers_of_the_hubs_own_code_are_removed(place: Place) -> None:
    place.hub.model(NAME, FILES)
    blobs = place.folder / "blobs"
    blobs.mkdir(parents=True)
    locks = place.cache / ".locks" / place.folder.name
    locks.mkdir(parents=True)
    left = blobs / f"{'a' * 64}.0123abcd.incomplete"
    left.write_bytes(b"x" * 5000)
    (locks / f"{'a' * 64}.lock").touch()
    result = place.run()
    assert not left.exists()
    assert "removed 0.01 MB" in "\n".join(result.lines)


def test_content_with_another_hash_is_refused_and_fetched_again(place: Place) -> None:
    commit = place.hub.model(NAME, FILES).refs["main"]
    name = "model-00001-of-00002.safetensors"
    place.hub.flipped.add(name)
    result = place.run()
    assert result.code == 0, result
    assert "another sha256" in "\n".join(result.lines)
    assert place.content(commit) == TAKEN
    assert len(place.hub.downloads(name)) == 2


def test_a_truncated_shard_in_the_cache_is_noticed_and_fetched_again(filled: Place) -> None:
    commit = filled.hub.models[NAME].refs["main"]
    name = "model-00001-of-00002.safetensors"
    blob = (filled.folder / "snapshots" / commit / name).resolve()
    os.truncate(blob, 1000)
    result = filled.run()
    assert result.code == 0, result
    assert f"{name} is damaged in the cache" in "\n".join(result.lines)
    assert filled.content(commit) == TAKEN
    assert not filled.hub.downloads("model-00002-of-00002.safetensors")


def test_a_full_disk_is_seen_before_anything_is_downloaded(place: Place) -> None:
    place.hub.model(NAME, FILES)
    size = 10**18
    place.hub.sizes["model-00001-of-00002.safetensors"] = size
    result = place.run()
    assert result.code == 1
    assert f"has no room for {NAME}: it needs 1,000,000,00" in result.complaint
    assert f"{size + sum(map(len, TAKEN.values())) - BIG:,}"[:20] in result.complaint
    assert "are free" in result.complaint
    assert not place.hub.downloads("safetensors")


def test_the_hub_is_down_and_the_cache_is_complete(filled: Place) -> None:
    commit = filled.hub.models[NAME].refs["main"]
    result = filled.run(endpoint="http://127.0.0.1:9")
    assert (result.code, result.answer["commit"], result.answer["downloaded"]) == (0, commit, 0)
    assert "connection refused" in result.lines[0]
    assert "in the cache and complete" in result.lines[0]


@pytest.mark.parametrize(
    ("damage", "code"), [(None, 0), ("truncate", 1), ("remove", 1), ("config", 1)]
)
def test_the_hub_is_down_and_somebody_else_has_filled_the_cache(
    filled: Place, damage: str | None, code: int
) -> None:
    commit = filled.hub.models[NAME].refs["main"]
    shutil.rmtree(filled.folder / ".multinode-vllm")
    snapshot = filled.folder / "snapshots" / commit
    victim = snapshot / "model-00001-of-00002.safetensors"
    if damage == "truncate":
        os.truncate(victim.resolve(), len(FILES[victim.name]) - 1)
    elif damage == "remove":
        victim.unlink()
    elif damage == "config":
        (snapshot / "config.json").unlink()
    result = filled.run(endpoint="http://127.0.0.1:9")
    assert result.code == code, result
    if code:
        assert "connection refused" in result.complaint


def test_a_gated_model(place: Place) -> None:
    place.hub.model(NAME, FILES, is_gated=True, readers={"good"})
    place.hub.tokens = {"good", "other"}
    without = place.run()
    assert without.code == 1
    assert "is gated, and there is no token (HTTP 401" in without.complaint
    assert f"accept the licence at {place.hub.url}/{NAME}" in without.complaint
    assert "secrets: {HF_TOKEN: {env: HF_TOKEN}}" in without.complaint
    other = place.run(token="other")
    assert "the account of the token in HF_TOKEN has no access (HTTP 403" in other.complaint
    good = place.run(token="good")
    assert good.code == 0, good
    tokens = {request.token for request in place.hub.requests if request.is_storage}
    assert tokens == {None}
    assert place.run(env={"HF_TOKEN": "good"}).code == 0


def test_a_token_never_shows(place: Place) -> None:
    place.hub.model(NAME, FILES, is_gated=True)
    result = place.run(token="hf_abcdef")
    assert "does not accept the token in HF_TOKEN (HTTP 401" in result.complaint
    assert "hf_abcdef" not in result.complaint + "\n".join(result.lines)
    assert "hf_abcdef" not in " ".join(place.argv())


def test_a_private_or_unknown_model(place: Place) -> None:
    place.hub.model(NAME, FILES, is_private=True, readers={"good"})
    place.hub.tokens = {"good", "other"}
    result = place.run()
    assert f"has no model {NAME}, or does not show it to anyone without a token" in result.complaint
    result = place.run(token="other")
    assert "does not show it to the token in HF_TOKEN (HTTP 404" in result.complaint
    assert place.run(token="good").code == 0


def test_an_unknown_revision(place: Place) -> None:
    place.hub.model(NAME, FILES)
    result = place.run(revision="v9")
    assert result.code == 1
    assert "has no branch, tag or commit 'v9' (HTTP 404" in result.complaint


def test_a_name_that_is_none(place: Place) -> None:
    assert "is not the name of a model" in place.run(repository="a/b/c").complaint
    assert "is not a name of a model" in place.run(repository="../b").complaint
    assert "is not a name of a model" in place.run(revision="../../x").complaint


def test_too_many_requests_pass(place: Place) -> None:
    place.hub.model(NAME, FILES)
    place.hub.limited = 1
    result = place.run()
    assert result.code == 0, result
    assert "too many requests" in result.lines[0]


def test_too_many_requests_for_too_long(place: Place) -> None:
    place.hub.model(NAME, FILES)
    place.hub.limited = 100
    result = place.run(attempts=2)
    assert result.code == 1
    assert "too many requests from this network or account (HTTP 429" in result.complaint
    assert "with a token the limit is higher" in result.complaint


def test_a_storage_that_is_overloaded(place: Place) -> None:
    commit = place.hub.model(NAME, FILES).refs["main"]
    place.hub.failing = 2
    result = place.run()
    assert result.code == 0, result
    assert place.content(commit) == TAKEN


def test_no_name_server(place: Place) -> None:
    result = place.run(endpoint="http://no-such-hub.invalid", attempts=1)
    assert result.code == 1
    assert "no address for the name no-such-hub.invalid" in result.complaint
    assert "HTTPS_PROXY" in result.complaint


def test_a_proxy_that_is_down(place: Place) -> None:
    proxy = {"https_proxy": "http://127.0.0.1:9"}
    result = place.run(endpoint="https://hub.invalid", attempts=1, env=proxy)
    assert result.code == 1
    assert "through the proxy in https_proxy" in result.complaint


def test_a_login_page_is_not_a_hub(place: Place) -> None:
    place.hub.page = "<html>please log in</html>"
    result = place.run()
    assert result.code == 1
    assert "is not a hub" in result.complaint


def test_a_certificate_that_nobody_knows(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    made += ["-nodes", "-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"]
    subprocess.run(made, check=True, capture_output=True)
    certificate.write_text(certificate.read_text() + key.read_text())
    with running(certificate) as hub:
        result = Place(hub, tmp_path / "cache").run()
    assert result.code == 1
    assert "its TLS certificate does not hold: self" in result.complaint
    assert "timedatectl" in result.complaint


def test_a_cache_that_cannot_be_written(place: Place) -> None:
    place.hub.model(NAME, FILES)
    place.cache.mkdir()
    (place.cache / place.folder.name).write_text("in the way")
    result = place.run()
    assert result.code == 1
    assert str(place.folder) in result.complaint


def test_a_signed_address_is_cut_off() -> None:
    assert first_line("\n 403 for https://x/y?Signature=secret here\nmore") == (
        "403 for https://x/y here"
    )
