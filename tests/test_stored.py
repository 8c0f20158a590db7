"""What is kept on a host, and the end of it: real directories, and a docker that is a script."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from cluster.remote.stored import docker_size, docker_time, repository
from cluster.stored import (
    Current,
    Deleted,
    Entry,
    Stored,
    age,
    chosen,
    delete_summary,
    entries,
    list_argument,
    problems,
    size_text,
    table_rows,
)

OLD, NEW = "a" * 40, "b" * 40
DAY = 86400

DOCKER = """#!{python}
# A docker that has what state.json says.
import json, pathlib, sys
place = pathlib.Path({state!r})
state = json.loads(place.read_text())
words = sys.argv[1:]
state["calls"].append(words)
place.write_text(json.dumps(state))
def fail(text):
    sys.stderr.write(text + "\\n")
    sys.exit(1)
if state.get("down"):
    fail("Cannot connect to the Docker daemon")
if words[:2] == ["image", "ls"]:
    for image in state["images"]:
        print(image["Id"], image.get("shown", "1.23kB"))
elif words[0] == "ps":
    print("\\n".join(container["Id"] for container in state["containers"]))
elif words[0] == "info":
    print({state!r}.rpartition("/")[0])
elif words[1] == "inspect":
    kind = state["images" if words[0] == "image" else "containers"]
    known = {{each["Id"]: each for each in kind}}
    missing = [word for word in words[2:] if word not in known]
    if missing:
        fail("Error: No such " + words[0] + ": " + missing[0])
    print(json.dumps([known[word] for word in words[2:]]))
elif words[:2] == ["image", "rm"]:
    assert "--force" not in words
    for image in list(state["images"]):
        if words[2] in [image["Id"], *image["RepoTags"], *image["RepoDigests"]]:
            if state.get("refuses"):
                fail("Error: conflict: container 1 is using its referenced image")
            image["RepoTags"] = [tag for tag in image["RepoTags"] if tag != words[2]]
            if not image["RepoTags"]:
                state["images"].remove(image)
            place.write_text(json.dumps(state))
            break
    else:
        fail("Error: No such image: " + words[2])
"""


def image(number: int, tags: list[str], digests: list[str] | None = None) -> dict[str, Any]:
    return {
        "Id": f"sha256:{number:064d}",
        "RepoTags": tags,
        "RepoDigests": digests or [],
        "Size": number * 1_000_000_000,
        "Created": "2026-11-30T12:00:00.123456789Z",
    }


@dataclass
class Host:
    """A host with a Docker, a Hugging Face cache, a plain model and a place for transfers."""

    root: Path

    @property
    def cache(self) -> Path:
        return self.root / "hub"

    @property
    def plain(self) -> Path:
        return self.root / "models" / "plain model"

    @property
    def transfers(self) -> Path:
        return self.root / "transfers"

    @property
    def docker(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / "state.json").read_text())
        return found

    def set_docker(self, **state: Any) -> None:
        whole = {"images": [], "containers": [], "calls": [], **state}
        (self.root / "state.json").write_text(json.dumps(whole))

    def run(self, role: str, **more: Any) -> dict[str, Any]:
        """Run the program as a host does."""
        wanted = list_argument(
            ["docker.io/vllm/vllm-openai"],
            [str(self.cache)],
            [str(self.plain)],
            [str(self.transfers)],
        )
        result = subprocess.run(
            [sys.executable, "-", role, json.dumps(wanted | more)],
            input=files("cluster.remote").joinpath("stored.py").read_text(encoding="utf-8"),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env={**os.environ, "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}"},
        )
        assert (result.returncode, result.stderr) == (0, "")
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    def list(self) -> Stored:
        return Stored.model_validate(self.run("list"))

    def delete(self, *rows: dict[str, str]) -> Deleted:
        named = [{"name": "it", **row} for row in rows]
        return Deleted.model_validate(self.run("delete", entries=named))

    def model(self, name: str, commits: dict[str, dict[str, bytes]], ref: str = "") -> Path:
        """Fill the cache as huggingface_hub does. The same content is the same blob."""
        folder = self.cache / f"models--{name.replace('/', '--')}"
        (folder / "blobs").mkdir(parents=True)
        for commit, content in commits.items():
            for path, data in content.items():
                blob = folder / "blobs" / data[:1].hex().zfill(64)
                blob.write_bytes(data)
                link = folder / "snapshots" / commit / path
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(os.path.relpath(blob, link.parent))
        if ref:
            (folder / "refs").mkdir()
            (folder / "refs" / "main").write_text(ref)
        return folder


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    root = tmp_path / "a host"
    for path in ("bin", "hub", "models/plain model", "transfers"):
        (root / path).mkdir(parents=True)
    program = root / "bin" / "docker"
    program.write_text(DOCKER.format(python=sys.executable, state=str(root / "state.json")))
    program.chmod(0o755)
    made = Host(root)
    made.set_docker()
    yield made


def two_snapshots(host: Host) -> Path:
    """One file of both commits, one of each."""
    return host.model(
        "org/two",
        {
            OLD: {"config.json": b"c" * 5000, "model.safetensors": b"o" * 100_000},
            NEW: {"config.json": b"c" * 5000, "sub/model.safetensors": b"n" * 300_000},
        },
        ref=NEW,
    )


def on_disk(path: Path) -> int:
    return path.lstat().st_blocks * 512


def test_a_host_without_anything(host: Host) -> None:
    host.plain.rmdir()
    assert host.list() == Stored()


def test_images_of_our_repositories_only(host: Host) -> None:
    digest = f"vllm/vllm-openai@sha256:{'d' * 64}"
    host.set_docker(
        images=[
            image(1, ["vllm/vllm-openai:v0.16", "mine:latest"]),
            image(2, ["vllm/vllm-openai:v0.17"], [digest]),
            image(3, ["postgres:16"]),
            image(4, [], [digest.replace("ddd", "eee")]),
            image(5, ["other/vllm-openai:v1"]),
        ],
        containers=[
            {
                "Id": "c1",
                "Name": "/vllm-ray",
                "Image": image(2, [])["Id"],
                "Config": {"Image": "x"},
            }
        ],
    )
    found = host.list().images
    assert [row.id[-1] for row in found] == ["1", "2", "4"]
    assert [row.used_by for row in found] == [[], ["vllm-ray"], []]
    assert found[0].foreign == ["mine:latest"]
    assert found[1].references == ["vllm/vllm-openai:v0.17", digest]
    assert found[1].bytes == 2_000_000_000
    assert found[1].created == 1796040000


def test_a_docker_that_is_down_does_not_hide_the_models(host: Host) -> None:
    two_snapshots(host)
    host.set_docker(down=True)
    found = host.list()
    assert found.docker_error == "Cannot connect to the Docker daemon"
    assert [model.name for model in found.models] == ["org/two", str(host.plain)]
    assert problems({"spark-1": found}) == [
        "spark-1: its images are unknown: Cannot connect to the Docker daemon"
    ]


def test_models_with_their_snapshots(host: Host) -> None:
    folder = two_snapshots(host)
    blobs = {path.name[-2:]: on_disk(path) for path in (folder / "blobs").iterdir()}
    model = host.list().models[0]
    assert (model.kind, model.name, model.path) == ("cache", "org/two", str(folder))
    every = [path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]
    assert model.bytes == sum(map(on_disk, every))
    old, new = model.snapshots
    assert (old.commit, old.refs, old.bytes) == (OLD, [], blobs[b"o".hex()])
    assert (new.commit, new.refs, new.bytes) == (NEW, ["main"], blobs[b"n".hex()])


def test_a_sparse_file_weighs_what_it_takes_and_a_hard_link_nothing(host: Host) -> None:
    sparse = host.plain / "model.safetensors"
    with sparse.open("wb") as stream:
        stream.truncate(5 << 30)
        stream.write(b"x" * 8192)
    (host.plain / "again.safetensors").hardlink_to(sparse)
    (model,) = host.list().models
    assert (model.kind, model.bytes) == ("directory", on_disk(sparse))
    assert model.bytes < 1 << 20


def test_the_last_use_is_the_newest_time_of_a_file(host: Host) -> None:
    folder = two_snapshots(host)
    now = time.time()
    for number, path in enumerate(sorted((folder / "blobs").iterdir())):
        os.utime(path, (now - number * DAY, now - 30 * DAY))
    os.utime(folder / "refs" / "main", (now - 9 * DAY, now - 9 * DAY))
    model = host.list().models[0]
    if model.has_atime:
        # blobs by name: c (both commits), n, o
        assert model.last_use == pytest.approx(now, abs=1)
        assert model.snapshots[1].last_use == pytest.approx(now, abs=1)
    else:
        assert model.snapshots[0].last_use == pytest.approx(now - 30 * DAY, abs=1)


def test_what_a_process_has_open_is_in_use(host: Host) -> None:
    folder = two_snapshots(host)
    with (folder / "snapshots" / OLD / "model.safetensors").open("rb"):
        model = host.list().models[0]
        assert (model.is_open, [each.is_open for each in model.snapshots]) == (True, [True, False])
        answer = host.delete({"kind": "snapshot", "path": str(folder), "commit": OLD})
        assert [row.why for row in answer.refused] == ["a process has it open"]
    assert (folder / "snapshots" / OLD).exists()


def test_the_end_of_a_snapshot_spares_the_other(host: Host) -> None:
    folder = two_snapshots(host)
    (folder / "refs" / "v1").write_text(OLD)
    (folder / ".multinode-vllm").mkdir()
    (folder / ".multinode-vllm" / f"{OLD}.json").write_text("[]")
    expected = on_disk(folder / "blobs" / b"o".hex().zfill(64))
    answer = host.delete({"kind": "snapshot", "path": str(folder), "commit": OLD})
    assert (answer.freed, answer.refused) == (expected, [])
    assert sorted(path.name[-2:] for path in (folder / "blobs").iterdir()) == [
        b"c".hex(),
        b"n".hex(),
    ]
    assert (folder / "snapshots" / NEW / "config.json").read_bytes() == b"c" * 5000
    assert [path.name for path in (folder / "refs").iterdir()] == ["main"]
    assert not list((folder / ".multinode-vllm").iterdir())
    # The last one takes the model with it.
    answer = host.delete({"kind": "snapshot", "path": str(folder), "commit": NEW})
    assert answer.freed > 300_000
    assert not folder.exists()
    again = host.delete({"kind": "snapshot", "path": str(folder), "commit": NEW})
    assert (again.freed, again.refused) == (0, [])


def test_an_image_is_deleted_by_its_names(host: Host) -> None:
    digest = f"vllm/vllm-openai@sha256:{'d' * 64}"
    host.set_docker(images=[image(1, ["vllm/vllm-openai:a", "vllm/vllm-openai:b"], [digest])])
    answer = host.delete({"kind": "image", "id": image(1, [])["Id"]})
    assert answer.refused == []
    assert host.docker["images"] == []
    removed = [call for call in host.docker["calls"] if call[:2] == ["image", "rm"]]
    assert removed[0] == ["image", "rm", "vllm/vllm-openai:a"]


@pytest.mark.parametrize(
    ("tags", "container", "refuses", "why"),
    [
        (["vllm/vllm-openai:a"], True, False, "container old-test uses it"),
        (["vllm/vllm-openai:a", "mine:1"], False, False, "it is also mine:1"),
        (["postgres:16"], False, False, "no repository of this cluster has it"),
        (["vllm/vllm-openai:a"], False, True, "container 1 is using"),
    ],
)
def test_an_image_that_stays(
    host: Host, tags: list[str], container: bool, refuses: bool, why: str
) -> None:
    row = image(1, tags)
    user = {"Id": "c", "Name": "/old-test", "Image": row["Id"], "Config": {"Image": tags[0]}}
    host.set_docker(images=[row], containers=[user] if container else [], refuses=refuses)
    answer = host.delete({"kind": "image", "id": row["Id"]})
    assert [why in refusal.why for refusal in answer.refused] == [True]
    assert len(host.docker["images"]) == 1


def test_a_model_of_another_place_stays(host: Host, tmp_path: Path) -> None:
    outside = tmp_path / "outside" / "models--a--b"
    outside.mkdir(parents=True)
    (outside / "file").write_text("keep")
    link = host.cache / "models--x--y"
    link.symlink_to(outside)
    for path in (
        outside,
        link,
        host.cache,
        host.cache / "models--x--y" / "..",
        f"{host.cache}/../hub/models--x--y",
        "/",
        "/etc",
    ):
        answer = host.delete({"kind": "model", "path": str(path)})
        assert len(answer.refused) == 1, path
    assert (outside / "file").read_text() == "keep"
    assert host.list().models[0].path == str(host.plain)


def test_links_that_lead_outside_end_alone(host: Host, tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    outside.write_bytes(b"x" * 50_000)
    folder = two_snapshots(host)
    (folder / "snapshots" / OLD / "linked").symlink_to(outside)
    (host.plain / "linked").symlink_to(outside)
    assert host.list().models[1].bytes < 50_000
    answer = host.delete(
        {"kind": "snapshot", "path": str(folder), "commit": OLD},
        {"kind": "model", "path": str(host.plain)},
    )
    assert answer.refused == []
    assert outside.read_bytes() == b"x" * 50_000
    assert not host.plain.exists()


def test_snapshots_behind_a_symlink_are_left_alone(host: Host, tmp_path: Path) -> None:
    folder = two_snapshots(host)
    moved = tmp_path / "elsewhere"
    (folder / "snapshots").rename(moved)
    (folder / "snapshots").symlink_to(moved)
    answer = host.delete({"kind": "snapshot", "path": str(folder), "commit": OLD})
    assert [row.why for row in answer.refused] == ["a symlink is on the way to it"]
    assert (moved / OLD / "config.json").is_symlink()


def test_a_directory_behind_a_symlink_is_left_alone(host: Host, tmp_path: Path) -> None:
    host.plain.rmdir()
    real = tmp_path / "real"
    real.mkdir()
    host.plain.symlink_to(real)
    found = host.list()
    assert (found.models, found.problems) == (
        [],
        [f"{host.plain} is a symlink; it is left alone"],
    )
    answer = host.delete({"kind": "model", "path": str(host.plain)})
    assert [row.why for row in answer.refused] == ["a symlink is on the way to it"]
    assert real.exists()


def test_leftovers_of_interrupted_transfers(host: Host) -> None:
    folder = two_snapshots(host)
    begun = folder / "blobs" / f"{'c' * 64}.incomplete"
    parts = [
        begun,
        folder / "blobs" / f"{'d' * 64}.0123abcd.incomplete",
        host.plain / ".model.safetensors.relay.part",
        host.transfers / "image.tar.part",
    ]
    own = host.plain / "weights.part"
    for path in [*parts, own]:
        path.write_bytes(b"x" * 10_000)
        os.utime(path, (time.time() - DAY, time.time() - DAY))
    found = host.list()
    assert {row.path for row in found.leftovers} == {str(path) for path in parts}
    assert all(row.bytes == on_disk(begun) for row in found.leftovers)
    answer = host.delete(*({"kind": "leftover", "path": str(path)} for path in [*parts, own]))
    assert answer.freed == 4 * 12288
    assert [row.why for row in answer.refused] == [
        "it is not what a transfer of this cluster has left"
    ]
    assert [path.exists() for path in [*parts, own]] == [False] * 4 + [True]


@pytest.mark.parametrize("how", ["locked", "fresh", "open"])
def test_a_transfer_under_way_is_left_alone(host: Host, how: str) -> None:
    folder = two_snapshots(host)
    begun = folder / "blobs" / f"{'c' * 64}.incomplete"
    begun.write_bytes(b"x")
    if how != "fresh":
        os.utime(begun, (time.time() - DAY, time.time() - DAY))
    lock = host.cache / ".locks" / folder.name / f"{'c' * 64}.lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    path = lock if how == "locked" else begun
    with path.open("rb") as stream:
        if how == "locked":
            fcntl.flock(stream, fcntl.LOCK_EX)
        if how == "fresh":
            stream.close()
        assert host.list().leftovers[0].is_open is (how != "fresh")
        row = {"kind": "leftover", "path": str(begun)}
        assert len(host.delete(row).refused) == 1
    assert begun.exists()


def test_an_unknown_kind(host: Host) -> None:
    assert [row.why for row in host.delete({"kind": "disk"}).refused] == ["unknown kind"]


def test_names_and_times_of_docker() -> None:
    assert repository("docker.io/vllm/vllm-openai:v1@sha256:00") == "vllm/vllm-openai"
    assert repository("localhost:5000/a/b:c") == "localhost:5000/a/b"
    assert repository("docker.io/library/x") == "x"
    assert docker_time("2026-11-30T13:00:00+01:00") == docker_time("2026-11-30T12:00:00Z")
    assert docker_time("0001-01-01T00:00:00Z") is None
    assert docker_time("") is None
    sizes = [docker_size(text) for text in ("0B", "13.3kB", "587MB", "3.83GB", "1.2TB", "", "N/A")]
    assert sizes == [0, 13_300, 587_000_000, 3_830_000_000, 1_200_000_000_000, 0, 0]


def test_an_image_takes_what_it_is_unpacked_to(host: Host) -> None:
    """In containerd's store, where inspect tells the size of the packed layers."""
    host.set_docker(images=[{**image(1, ["vllm/vllm-openai:v1"]), "shown": "3.83GB"}])
    assert [each.bytes for each in host.list().images] == [3_830_000_000]


# The rules, without a host.


def stored(**rows: Any) -> Stored:
    return Stored.model_validate(rows)


def image_row(number: int, **more: Any) -> dict[str, Any]:
    row = {"id": f"sha256:{number:064d}", "references": [f"vllm/vllm-openai:v{number}"]}
    return {**row, "bytes": number * 10**9, "created": 0.0, "used_by": [], **more}


def snapshot_row(commit: str, refs: list[str], **more: Any) -> dict[str, Any]:
    row = {"commit": commit, "refs": refs, "bytes": 5, "last_use": 1000.0, "is_open": False}
    return {**row, **more}


def model_row(name: str, *snapshots: dict[str, Any], **more: Any) -> dict[str, Any]:
    row = {"kind": "cache", "name": name, "path": f"/hub/{name}", "bytes": 7, "has_atime": True}
    return {**row, "last_use": 1000.0, "is_open": False, "snapshots": [*snapshots], **more}


CURRENT = Current(image="docker.io/vllm/vllm-openai:v2", model="org/name")


def uses(kept: Stored, current: Current = CURRENT) -> dict[str, str]:
    return {entry.name: entry.in_use for entry in entries({"spark-1": kept}, current)}


def test_which_image_is_in_use() -> None:
    kept = stored(
        images=[
            image_row(1),
            image_row(2),
            image_row(3, used_by=["x", "y"]),
            image_row(4, foreign=["mine:1"]),
            image_row(5, references=[f"vllm/vllm-openai@sha256:{'5' * 64}"]),
        ]
    )
    assert uses(kept) == {
        "vllm/vllm-openai:v1": "",
        "vllm/vllm-openai:v2": "image of this cluster",
        "vllm/vllm-openai:v3": "container x, y",
        "vllm/vllm-openai:v4": "also mine:1",
        f"vllm/vllm-openai@sha256:{'5' * 12}": "",
    }
    by_id = Current("other", "m", image_ids=frozenset({f"sha256:{1:064d}"}))
    assert uses(kept, by_id)["vllm/vllm-openai:v1"] == "image of this cluster"
    by_digest = Current(f"vllm/vllm-openai@sha256:{'5' * 64}", "m")
    assert uses(kept, by_digest)[f"vllm/vllm-openai@sha256:{'5' * 12}"] == "image of this cluster"


@pytest.mark.parametrize(
    ("commit", "revision", "served"),
    [
        (None, "main", {NEW}),
        (OLD, "main", {OLD}),
        (None, OLD, {OLD}),
        ("c" * 40, "main", {OLD, NEW}),
        (None, "no-such", {OLD, NEW}),
    ],
)
def test_which_snapshot_is_in_use(commit: str | None, revision: str, served: set[str]) -> None:
    kept = stored(
        models=[
            model_row("org/name", snapshot_row(OLD, []), snapshot_row(NEW, ["main"])),
            model_row("org/other", snapshot_row(OLD, ["main"])),
        ]
    )
    current = Current("i", "org/name", commit=commit, revision=revision)
    assert uses(kept, current) == {
        f"org/name@{OLD[:12]}": "model of this cluster" if OLD in served else "",
        f"org/name@{NEW[:12]}": "model of this cluster" if NEW in served else "",
        f"org/other@{OLD[:12]}": "",
    }


def test_directories_begun_models_and_open_files() -> None:
    kept = stored(
        models=[
            model_row("/models/a", path="/models/a", kind="directory"),
            model_row("/models/b", path="/models/b", kind="directory", is_open=True),
            model_row("org/begun"),
            model_row("org/open", snapshot_row(OLD, [], is_open=True)),
        ],
        leftovers=[
            {"path": "/hub/x.incomplete", "bytes": 3, "last_use": 5.0, "is_open": True},
        ],
    )
    assert uses(kept, Current("i", "/models/a")) == {
        "/models/a": "model of this cluster",
        "/models/b": "open files",
        "org/begun": "",
        f"org/open@{OLD[:12]}": "open files",
        "/hub/x.incomplete": "a transfer is under way",
    }


def everything() -> list[Entry]:
    kept = stored(
        images=[image_row(1), image_row(2)],
        models=[
            model_row("org/name", snapshot_row(OLD, []), snapshot_row(NEW, ["main"])),
            model_row("org/other", snapshot_row(OLD, ["main"], bytes=10**7), has_atime=False),
        ],
        leftovers=[{"path": "/hub/x.incomplete", "bytes": 3, "last_use": 940.0, "is_open": False}],
    )
    return entries({"spark-1": kept, "spark-2": stored(images=[image_row(1)])}, CURRENT)


def test_the_table() -> None:
    built, new = "built 2 days ago", f"org/name@{NEW[:12]}"
    assert table_rows(everything(), now=1000.0 + 2 * DAY) == [
        ("spark-1", "image", "vllm/vllm-openai:v2", "2.00 GB", built, "image of this cluster"),
        ("spark-1", "image", "vllm/vllm-openai:v1", "1.00 GB", built, "no"),
        ("spark-1", "snapshot", f"org/other@{OLD[:12]}", "10.00 MB", "written 2 days ago", "no"),
        ("spark-1", "snapshot", f"org/name@{OLD[:12]}", "5 B", "2 days ago", "no"),
        ("spark-1", "snapshot", new, "5 B", "2 days ago", "model of this cluster"),
        ("spark-1", "leftover", "/hub/x.incomplete", "3 B", "written 2 days ago", "no"),
        ("spark-2", "image", "vllm/vllm-openai:v1", "1.00 GB", built, "no"),
    ]
    assert [age(last, 4000.0) for last in (None, 3999.0, 3940.0, 300.0, 5000.0)] == [
        "unknown",
        "just now",
        "1 minute ago",
        "1 hour ago",
        "just now",
    ]
    assert [size_text(size) for size in (0, 1500, 10**9)] == ["0 B", "1.50 kB", "1.00 GB"]


def test_unused_means_all_that_may_go() -> None:
    choice = chosen(everything(), "unused")
    assert choice.problems == []
    assert choice.bytes == 2 * 10**9 + 10**7 + 5 + 3
    assert choice.arguments("spark-2") == [
        {"kind": "image", "name": "vllm/vllm-openai:v1", "id": f"sha256:{1:064d}"}
    ]
    assert [row["kind"] for row in choice.arguments("spark-1")] == [
        "image",
        "snapshot",
        "snapshot",
        "leftover",
    ]


@pytest.mark.parametrize(
    ("confirmation", "names"),
    [
        ("vllm/vllm-openai:v1", ["vllm/vllm-openai:v1"] * 2),
        (f"org/name@{OLD[:12]}, /hub/x.incomplete", [f"org/name@{OLD[:12]}", "/hub/x.incomplete"]),
        (f"org/name@{OLD}", [f"org/name@{OLD[:12]}"]),
        ("org/name", [f"org/name@{OLD[:12]}"]),
        (f"org/name,org/name@{OLD}", [f"org/name@{OLD[:12]}"]),
    ],
)
def test_names_that_are_confirmed(confirmation: str, names: list[str]) -> None:
    choice = chosen(everything(), confirmation)
    assert (choice.problems, [entry.name for entry in choice.entries]) == ([], names)


@pytest.mark.parametrize(
    ("confirmation", "says"),
    [
        ("org/nme", "no host has 'org/nme'; what may be deleted: vllm/vllm-openai:v1, org/other@"),
        (
            "vllm/vllm-openai:v2",
            "vllm/vllm-openai:v2 is in use on spark-1: image of this cluster",
        ),
        (f"org/name@{NEW[:12]}", "is in use on spark-1: model of this cluster"),
        (" , ", "nothing is named: delete=NAME, or delete=unused"),
    ],
)
def test_names_that_are_refused(confirmation: str, says: str) -> None:
    choice = chosen(everything(), confirmation)
    assert choice.entries == []
    assert [says in problem for problem in choice.problems] == [True]


def test_what_is_said_after_it() -> None:
    answer = Deleted.model_validate(
        {
            "deleted": [{"kind": "image", "name": "a", "freed": 2_000_000}],
            "refused": [{"kind": "model", "name": "b", "why": "a process has it open"}],
            "freed": 2_000_000,
        }
    )
    lines, is_done = delete_summary({"spark-1": answer})
    assert lines == [
        "spark-1: deleted a, 2.00 MB",
        "spark-1: kept b: a process has it open",
        "freed 2.00 MB",
    ]
    assert not is_done


def test_from_a_host_to_the_end(host: Host) -> None:
    folder = two_snapshots(host)
    host.set_docker(images=[image(1, ["vllm/vllm-openai:v1"]), image(2, ["vllm/vllm-openai:v2"])])
    current = Current("vllm/vllm-openai:v2", "org/two")
    choice = chosen(entries({"h": host.list()}, current), "unused")
    assert choice.problems == []
    answer = host.delete(*choice.arguments("h"))
    assert answer.refused == []
    left = {entry.name: entry.in_use for entry in entries({"h": host.list()}, current)}
    assert left == {
        "vllm/vllm-openai:v2": "image of this cluster",
        f"org/two@{NEW[:12]}": "model of this cluster",
    }
    assert folder.exists()
