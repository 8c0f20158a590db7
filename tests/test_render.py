"""What a cluster file becomes: env files, units, ssh_config. Golden files, properties, pure rules.

Renew the golden files with: UPDATE_GOLDEN=1 pytest tests/test_render.py (and read the diff).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import node
from cluster.environment import env_file, node_environment
from cluster.load import load
from cluster.node import Image, Versions, render
from cluster.settings import Cluster, flag_arguments, problems
from cluster.ssh import ssh_config
from cluster.units import quote

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
IMAGE = Image("sha256:" + "ab" * 32, Versions("3.12.9", "0.17.1", "2.48.0", "2.9.0"))
CASES = {
    "two-sparks": ROOT / "group_data" / "examples" / "two-sparks.yaml",
    "four-hosts": ROOT / "tests" / "clusters" / "four-hosts.yaml",
    "one-host": ROOT / "tests" / "clusters" / "one-host.yaml",
    "no-ray": ROOT / "tests" / "clusters" / "no-ray.yaml",
    "lab": ROOT / "tests" / "lab" / "cluster.yaml",
}


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_RAY_TOKEN", "ray-token")
    monkeypatch.setenv("TEST_API_KEY", "api-key")
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.chdir("/")


@pytest.mark.parametrize("case", CASES)
def test_golden_files(case: str) -> None:
    cluster = load(CASES[case])
    written: dict[str, str] = {}
    for name in cluster.nodes:
        for file in render(cluster, name, IMAGE).files:
            if not file.path.endswith(".py"):
                written[f"{name}/{Path(file.path).name}"] = file.content
    written["ssh_config"] = ssh_config(cluster, None)
    folder = GOLDEN / case
    if os.environ.get("UPDATE_GOLDEN"):
        for name, content in written.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content, encoding="utf-8")
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == set(written)
    for name, content in written.items():
        assert content == (folder / name).read_text(encoding="utf-8"), name


def docker_env(text: str) -> dict[str, str]:
    """Parse an env file as docker run --env-file does (docker/cli, opts/file.go)."""
    values: dict[str, str] = {}
    for line in text.split("\n"):
        line = line.removesuffix("\r").lstrip(" \t")
        assert len(line.encode()) < 64 * 1024
        if not line or line.startswith("#"):
            continue
        name, separator, value = line.partition("=")
        assert name
        assert not any(character in name for character in " \t")
        assert separator
        values[name] = value
    return values


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0"), max_size=80)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Any valid cluster of one to five hosts."""
    count = draw(st.integers(1, 5))
    gpus = draw(st.integers(1, 8))
    env = st.dictionaries(NAMES, st.none() | VALUES, max_size=4)
    hosts: dict[str, Any] = {}
    for index in range(count):
        hosts[f"host-{index}"] = {
            "role": "worker" if index else "head",
            "gpus": gpus,
            "env": draw(env),
            "fabric": {
                "address": f"10.0.{draw(st.just(0))}.{index + 1}/{draw(st.just(24))}",
                "interface": draw(st.from_regex(r"[a-z][a-zA-Z0-9.]{0,13}", fullmatch=True)),
                "hcas": draw(st.none() | st.lists(st.sampled_from(["mlx5_0", "rocep1s0f1:1"]))),
            },
        }
    values = {
        "image": draw(st.sampled_from(["a/b:c", "a@sha256:" + "0" * 64])),
        "model": draw(st.sampled_from(["a/b", "/models/a b", "/models/%i$HOME"])),
        "executor": draw(st.sampled_from(["ray", "mp"])),
        "hosts": hosts,
        "env": draw(env),
    }
    cluster = Cluster.model_validate(values)
    assert not list(problems(cluster))
    return cluster


@given(clusters())
@settings(max_examples=150, deadline=None)
def test_docker_reads_back_every_value(cluster: Cluster) -> None:
    for name in cluster.nodes:
        wanted = {variable.name: variable.value for variable in node_environment(cluster, name)}
        files = {file.path: file.content for file in render(cluster, name, IMAGE).files}
        assert docker_env(files["/etc/vllm/node.env"]) == wanted


@given(clusters())
@settings(max_examples=100, deadline=None)
def test_the_users_word_beats_what_is_derived(cluster: Cluster) -> None:
    for name in cluster.nodes:
        values = {variable.name: variable.value for variable in node_environment(cluster, name)}
        own = {**cluster.env, **cluster.hosts[name].env}
        assert {key: values.get(key) for key in own} == own


def systemd_words(line: str) -> list[str]:
    """Split an Exec value as systemd does (systemd.syntax(7)), specifiers resolved."""
    words = shlex.split(line.replace("\\\n", " "), posix=True)
    return [word.replace("%%", "%").replace("$$", "$") for word in words]


@given(st.lists(VALUES.filter(lambda text: "\t" not in text), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_systemd_reads_back_every_argument(arguments: list[str]) -> None:
    line = " ".join(quote(argument) for argument in arguments)
    assert systemd_words(line) == arguments


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("case", CASES)
def test_systemd_takes_the_units(case: str, tmp_path: Path) -> None:
    cluster = load(CASES[case])
    units: list[str] = []
    for name in cluster.nodes:
        (tmp_path / name).mkdir()
        for file in render(cluster, name, IMAGE).files:
            if file.path.endswith((".service", ".timer")):
                path = tmp_path / name / Path(file.path).name
                path.write_text(file.content, encoding="utf-8")
                units.append(str(path))
        argv = ["systemd-analyze", "verify", *units]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        # What it says of other units is not about ours; docker may not be installed here.
        ours = [row for row in done.stderr.splitlines() if str(tmp_path) in row or "vllm-" in row]
        assert [row for row in ours if "docker" not in row] == []
        units.clear()


def test_null_removes_a_variable() -> None:
    cluster = load(CASES["four-hosts"])
    names = {variable.name for variable in node_environment(cluster, "node-b")}
    assert "GLOO_SOCKET_IFNAME" not in names
    assert "NCCL_SOCKET_IFNAME" in names


def test_every_derived_variable_says_who_reads_it() -> None:
    for case in CASES.values():
        cluster = load(case)
        for name in cluster.nodes:
            for variable in node_environment(cluster, name):
                own = variable.name in {**cluster.env, **cluster.hosts[name].env}
                assert own == variable.comment.startswith("from cluster.yaml"), variable


@pytest.mark.parametrize(
    ("version", "drains"),
    [("0.17.1", False), ("0.18.0rc1", True), ("0.32.0+cpu", True), ("1.0", True), (None, False)],
)
def test_running_requests_may_finish_where_vllm_knows_how(version: str, drains: bool) -> None:
    image = Image("sha256:ab", Versions("3.12.9", version, "2.48.0", "2.9.0"))
    cluster = load(CASES["lab"])
    unit = next(
        file.content
        for file in render(cluster, cluster.head, image).files
        if file.path.endswith("vllm-serve.service")
    )
    assert ("--shutdown-timeout=30" in unit) == drains
    assert f'\\"refuses\\": {str(drains).lower()}' in unit


def test_definitions_depend_on_what_they_stand_on() -> None:
    def definitions(**changes: Any) -> dict[str, str]:
        values = load(CASES["two-sparks"]).model_dump(mode="json", exclude_none=True)
        for path, value in changes.items():
            section = values
            *parents, last = path.split("__")
            for key in parents:
                section = section.setdefault(key.replace("_1", "-1").replace("_2", "-2"), {})
            section[last] = value
        cluster = Cluster.model_validate(values)
        return {
            f"{name} {container}": definition
            for name in cluster.nodes
            for container, definition in render(cluster, name, IMAGE).definitions.items()
        }

    def changed(**changes: Any) -> set[str]:
        return {key for key, value in definitions(**changes).items() if value != before[key]}

    before = definitions()
    everything = {"spark-1 vllm-ray", "spark-1 vllm-serve", "spark-2 vllm-ray"}
    assert set(before) == everything
    assert changed(serve__max_model_len=1024) == {"spark-1 vllm-serve"}
    assert changed(hosts__spark_2__env={"A": "b"}) == {"spark-2 vllm-ray", "spark-1 vllm-serve"}
    assert changed(hosts__spark_1__env={"A": "b"}) == everything
    assert changed(env={"A": "b"}) == everything
    assert changed(deadlines={"stop": 5}) == set()
    other_order = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert changed(env={**other_order, "NCCL_IGNORE_CPU_AFFINITY": "1"}) == set()
    assert changed(hosts__spark_2__ssh={"address": "elsewhere"}) == set()


def test_image_header_comes_back() -> None:
    text = render(load(CASES["one-host"]), "box", IMAGE).files[0].content
    assert node.parse_image_header(text) == IMAGE
    assert node.parse_image_header("") is None
    assert node.parse_image_header("# image sha256:1 {broken") is None


def test_flags_become_arguments() -> None:
    flags = {"a": True, "b": False, "c": 3, "d": ["x", "y z"], "e": {"k": 1}}
    assert flag_arguments(flags) == [
        *("--a", "--no-b", "--c", "3", "--d", "x", "y z", "--e", '{"k": 1}')
    ]


def test_ssh_config_ends_with_the_users_own() -> None:
    text = ssh_config(load(CASES["two-sparks"]), "/home/user/.ssh/config")
    assert text.endswith("    ProxyJump spark-1\n\nHost *\n    Include /home/user/.ssh/config\n")


def test_comments_cannot_break_out_of_their_line() -> None:
    cluster = load(CASES["one-host"])
    text = env_file(node_environment(cluster, "box"), ["header"])
    assert all("=" in row for row in text.splitlines() if row and not row.startswith("#"))
