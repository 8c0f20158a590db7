"""The image's way to the hosts: who pulls, who gets it from the head, by which digest."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.image import local_name, names, registry_endpoint, repository
from tests.conftest import CLUSTERS, Pyinfra
from tests.fleet import DIGEST, Fleet

BASE = (CLUSTERS / "two-hosts.yaml").read_text(encoding="utf-8")
NAME = "vllm/vllm-openai:v0.17.1"


def source(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(BASE.replace(f"image: {NAME}", f"image: {text}"), encoding="utf-8")
    return path


def ways(fleet: Fleet) -> list[tuple[str, str]]:
    found = []
    for name, command in fleet.history:
        if " docker pull " in command:
            found.append((name, command.rpartition(" ")[2]))
        elif command.startswith("python3 - registry"):
            found.append((name, command.partition('"role": "')[2].partition('"')[0]))
    return found


def test_everybody_pulls_what_the_head_has_pulled(run: Pyinfra, fleet: Fleet) -> None:
    assert run("-y", "tasks/image.py").exit_code == 0
    pinned = f"vllm/vllm-openai@{DIGEST}"
    assert ways(fleet) == [("spark-1", NAME), ("spark-2", pinned)]
    assert fleet["spark-2"].tags == [f"docker tag {pinned} {NAME}"]


def test_a_relay_downloads_once(run: Pyinfra, fleet: Fleet, tmp_path: Path) -> None:
    cluster = source(tmp_path, f"{{name: '{NAME}', source: relay}}")
    result = run("-y", "tasks/image.py", cluster=cluster)
    assert result.exit_code == 0, result.output
    assert sorted(ways(fleet)) == [
        ("spark-1", "resolve"),
        ("spark-1", "serve"),
        ("spark-2", "receive"),
    ]
    serve, receive = fleet["spark-1"].image_roles[-1], fleet["spark-2"].image_roles[0]
    assert (serve["digest"], receive["digest"]) == (DIGEST, DIGEST)
    assert serve["tag"] == receive["tag"] == NAME
    assert serve["ports"] == receive["ports"]
    assert [each["name"] for each in serve["receivers"]] == ["@fake/spark-2"]
    assert run("-y", "tasks/image.py", cluster=cluster).changes == 0


def test_auto_relays_to_whoever_does_not_reach_the_registry(
    run: Pyinfra, fleet: Fleet, tmp_path: Path
) -> None:
    cluster = source(tmp_path, f"{{name: '{NAME}', source: auto}}")
    fleet["spark-2"].reaches_registry = False
    assert run("-y", "tasks/image.py", cluster=cluster).exit_code == 0
    assert ("spark-2", "receive") in ways(fleet)
    del fleet.history[:]
    for host in fleet.hosts.values():
        host.image, host.reaches_registry = None, True
    assert run("-y", "tasks/image.py", cluster=cluster).exit_code == 0
    assert [name for name, way in ways(fleet) if "vllm" in way] == ["spark-1", "spark-2"]


def test_a_head_that_has_the_image_gives_that_one(
    run: Pyinfra, fleet: Fleet, tmp_path: Path
) -> None:
    cluster = source(tmp_path, f"{{name: '{NAME}', source: relay}}")
    run("-y", "tasks/image.py")
    fleet["spark-2"].image = None
    assert run("-y", "tasks/image.py", cluster=cluster).exit_code == 0
    resolve, serve = fleet["spark-1"].image_roles
    assert resolve["image"] == serve["image"] == f"vllm/vllm-openai@{DIGEST}"
    assert serve["tag"] is None


def test_a_worker_alone_says_that_it_needs_the_head(
    run: Pyinfra, fleet: Fleet, tmp_path: Path
) -> None:
    cluster = source(tmp_path, f"{{name: '{NAME}', source: relay}}")
    result = run("-y", "tasks/image.py", "--limit", "workers", cluster=cluster)
    assert result.exit_code == 1
    assert "gets the image from there" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vllm/vllm-openai:v1", ("vllm/vllm-openai", "vllm/vllm-openai:v1")),
        ("host:5000/a/b", ("host:5000/a/b", "host:5000/a/b")),
        ("host:5000/a/b:c", ("host:5000/a/b", "host:5000/a/b:c")),
        ("a/b@sha256:" + "1f" * 32, ("a/b", "a/b:sha256-" + "1f" * 8)),
        ("a/b:c@sha256:" + "1f" * 32, ("a/b", "a/b:sha256-" + "1f" * 8)),
    ],
)
def test_names(name: str, expected: tuple[str, str]) -> None:
    assert (repository(name), local_name(name)) == expected
    assert names(name) == list(dict.fromkeys([name, expected[1]]))


@pytest.mark.parametrize(
    ("name", "endpoint"),
    [
        ("vllm/vllm-openai:v1", ("registry-1.docker.io", 443)),
        ("debian", ("registry-1.docker.io", 443)),
        ("registry.lab:5000/a:b", ("registry.lab", 5000)),
        ("quay.io/a/b", ("quay.io", 443)),
        ("localhost/a", ("localhost", 443)),
    ],
)
def test_where_the_registry_is(name: str, endpoint: tuple[str, int]) -> None:
    assert registry_endpoint(name) == endpoint
