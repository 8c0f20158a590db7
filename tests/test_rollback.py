"""Going back to the last deployment that served: the plan, its order, and remote/known_good.py."""

from __future__ import annotations

import copy
import json
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cluster import node
from cluster.load import load
from cluster.node import Image, Versions
from cluster.operations import rollback
from cluster.settings import Cluster
from tests.conftest import CLUSTERS, Pyinfra
from tests.fleet import Fleet, fake

BASE = (CLUSTERS / "two-hosts.yaml").read_text(encoding="utf-8")
ROLLBACK = "on_failure: rollback\n"
BAD = "serve: {max_model_len: 1}\n"
PROGRAM = Path(__file__).parent.parent / "cluster" / "remote" / "known_good.py"


@pytest.fixture(autouse=True)
def _kept_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of fake hosts are none that a cluster file may have."""

    def cluster_of(values: dict[str, Any]) -> Cluster:
        hosts = {name.removeprefix("@fake/"): host for name, host in values["hosts"].items()}
        return fake(Cluster.model_validate({**values, "hosts": hosts}))

    monkeypatch.setattr(rollback, "_cluster_of", cluster_of)


def variant(folder: Path, *lines: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text("\n".join([BASE, *lines]), encoding="utf-8")
    return path


def test_a_deployment_is_identified_once_for_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, rendered = load(CLUSTERS / "two-hosts.yaml"), []

    def render(*arguments: Any) -> node.Node:
        rendered.append(arguments)
        return real(*arguments)

    real = node.render
    monkeypatch.setattr(node, "render", render)
    image = Image("sha256:1", Versions("3.12.9", "0.17.1", "2.48.0", "2.9.0"))
    # pyinfra copies the data of a host at every access.
    found = {rollback.identity(copy.copy(cluster), image) for _ in cluster.nodes}
    assert (len(found), len(rendered)) == (1, len(cluster.nodes))
    other = cluster.model_copy(update={"env": {"NCCL_DEBUG": "INFO"}})
    assert rollback.identity(other, image) not in found
    assert cluster.env == {}


def test_a_deploy_that_served_is_kept_once(run: Pyinfra, fleet: Fleet, tmp_path: Path) -> None:
    run("-y", "deploy.py")
    assert [len(fleet[name].kept) for name in fleet.hosts] == [1, 1]
    assert run("-y", "deploy.py").changes == 0
    for length in (10, 20):
        run("-y", "deploy.py", cluster=variant(tmp_path, f"serve: {{max_model_len: {length}}}"))
    assert [len(fleet[name].kept) for name in fleet.hosts] == [2, 2]


def test_rollback_goes_back_on_all_hosts_and_proves_it(
    run: Pyinfra, fleet: Fleet, tmp_path: Path
) -> None:
    run("-y", "deploy.py")
    good = {name: (dict(host.files), dict(host.running)) for name, host in fleet.hosts.items()}
    changed = variant(tmp_path, "env: {A: b}")
    assert run("-y", "deploy.py", cluster=changed).exit_code == 0
    assert {name: host.running for name, host in fleet.hosts.items()} != {
        name: running for name, (_, running) in good.items()
    }
    result = run("-y", "tasks/rollback.py", cluster=changed)
    assert result.exit_code == 0, result.output
    assert "Hello." in result.output
    for name, (files, running) in good.items():
        assert fleet[name].files == files
        assert fleet[name].running == running


def test_hosts_with_different_image_stores_go_back_together(
    run: Pyinfra, fleet: Fleet, tmp_path: Path
) -> None:
    for name in ("spark-1", "spark-2"):
        fleet[name].image = {"id": f"sha256:{name}", "digests": [], "content": "sha256:same"}
    run("-y", "deploy.py")
    good = {name: dict(host.files) for name, host in fleet.hosts.items()}
    changed = variant(tmp_path, "env: {A: b}")
    assert run("-y", "deploy.py", cluster=changed).exit_code == 0
    result = run("-y", "tasks/rollback.py", cluster=changed)
    assert result.exit_code == 0, result.output
    assert {name: host.files for name, host in fleet.hosts.items()} == good
    assert run("-y", "deploy.py").changes == 0


def test_what_still_runs_as_it_should_is_left_alone(
    run: Pyinfra, fleet: Fleet, tmp_path: Path
) -> None:
    run("-y", "deploy.py")
    changed = variant(tmp_path, BAD)
    run("-y", "deploy.py", cluster=changed)
    for host in fleet.hosts.values():
        host.starts.clear()
    assert run("-y", "tasks/rollback.py", cluster=changed).exit_code == 0
    assert [fleet[name].starts for name in ("spark-1", "spark-2")] == [["vllm-serve"], []]


def test_nothing_to_go_back_to(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    result = run("-y", "tasks/rollback.py")
    assert result.exit_code == 1
    assert "nothing to go back to: @fake/spark-1 keeps no other deployment" in result.output
    assert "Traceback" not in result.output


def test_other_hosts_are_refused(run: Pyinfra, fleet: Fleet, tmp_path: Path) -> None:
    run("-y", "deploy.py")
    for host in fleet.hosts.values():
        host.kept[0]["record"]["cluster"]["hosts"]["@fake/spark-9"] = host.kept[0]["record"][
            "cluster"
        ]["hosts"].pop("@fake/spark-2")
        host.kept[0]["record"]["name"] = "20260101T000000Z-abc.tar"
    result = run("-y", "tasks/rollback.py")
    assert result.exit_code == 1
    assert "was deployed on other hosts: @fake/spark-2, @fake/spark-9" in result.output


def test_a_failed_deploy_rolls_back_where_that_is_wanted(
    run: Pyinfra, fleet: Fleet, tmp_path: Path
) -> None:
    assert run("-y", "deploy.py", cluster=variant(tmp_path, ROLLBACK)).exit_code == 0
    good = {name: (dict(host.files), dict(host.running)) for name, host in fleet.hosts.items()}
    bad = variant(tmp_path, ROLLBACK, BAD)
    fleet.failing = "max-model-len=1\n"
    result = run("-y", "deploy.py", cluster=bad)
    assert result.exit_code == 1
    assert "unrecognized" in result.output
    assert "this deploy failed, see above; the hosts are back at the deployment of" in result.output
    assert result.output.count("Hello.") == 1  # the completion after the rollback
    for name, (files, running) in good.items():
        assert fleet[name].files == files
        assert fleet[name].running == running
    fleet.failing = ""
    assert run("-y", "deploy.py", cluster=variant(tmp_path, ROLLBACK)).changes == 0


def test_a_failed_deploy_stops_there_by_default(run: Pyinfra, fleet: Fleet, tmp_path: Path) -> None:
    run("-y", "deploy.py")
    fleet.failing = "max-model-len=1\n"
    result = run("-y", "deploy.py", cluster=variant(tmp_path, BAD))
    assert result.exit_code == 1
    assert "back at the deployment" not in result.output
    assert "Hello." not in result.output


def test_the_first_deploy_has_nothing_to_go_back_to(
    run: Pyinfra, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.failing = "max-model-len=1\n"
    result = run("-y", "deploy.py", cluster=variant(tmp_path, ROLLBACK, BAD))
    assert result.exit_code == 1
    assert "nothing to go back to" in result.output
    assert "Traceback" not in result.output


def test_a_failure_before_anything_was_touched_rolls_nothing_back(
    run: Pyinfra, fleet: Fleet, tmp_path: Path
) -> None:
    run("-y", "deploy.py", cluster=variant(tmp_path, ROLLBACK))
    fleet["spark-2"].image = {"id": "sha256:other", "digests": []}
    fleet["spark-2"].running.clear()
    result = run("-y", "deploy.py", cluster=variant(tmp_path, ROLLBACK))
    assert result.exit_code == 1
    assert "Put the files back" not in result.output


def known_good(role: str, folder: Path, **more: Any) -> dict[str, Any]:
    wanted = {
        "folder": str(folder / "known-good"),
        "paths": [str(folder / name) for name in ("node.env", "vllm-ray.service", "absent")],
        **more,
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), role, json.dumps(wanted)],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
    )
    return dict(json.loads(done.stdout)) if done.stdout else {}


def keep(folder: Path, name: str) -> None:
    known_good("keep", folder, name=name, keep=2, record={"since": name})


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "node.env").write_text("SECRET=1\n")
    (tmp_path / "node.env").chmod(0o600)
    (tmp_path / "systemctl").write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/calls"\n')
    (tmp_path / "systemctl").chmod(0o755)
    return tmp_path


def test_files_come_back_with_their_modes_and_the_others_go(files: Path) -> None:
    keep(files, "20260101T000000Z-aaa.tar")
    (files / "node.env").write_text("SECRET=2\n")
    (files / "node.env").chmod(0o644)
    unit = files / "vllm-ray.service"
    unit.write_text("[Unit]\n")
    found = known_good(
        "restore", files, name="20260101T000000Z-aaa.tar", units={str(unit): "vllm-ray.service"}
    )
    assert found["changed"] == [str(files / "node.env"), str(unit)]
    assert (files / "node.env").read_text() == "SECRET=1\n"
    assert stat.S_IMODE((files / "node.env").stat().st_mode) == 0o600
    assert not unit.exists()
    calls = (files / "calls").read_text().splitlines()
    assert calls == ["disable --quiet --now vllm-ray.service", "daemon-reload"]


def test_only_the_newest_are_kept_and_one_id_only_once(files: Path) -> None:
    for name in ("20260101T000000Z-aaa", "20260102T000000Z-bbb", "20260103T000000Z-aaa"):
        keep(files, f"{name}.tar")
    names = [row["name"] for row in known_good("list", files)["archives"]]
    assert names == ["20260103T000000Z-aaa.tar", "20260102T000000Z-bbb.tar"]
    keep(files, "20260104T000000Z-ccc.tar")
    names = [row["name"] for row in known_good("list", files)["archives"]]
    assert names == ["20260104T000000Z-ccc.tar", "20260103T000000Z-aaa.tar"]


def test_nobody_else_reads_an_archive(files: Path) -> None:
    keep(files, "20260101T000000Z-aaa.tar")
    archive = files / "known-good" / "20260101T000000Z-aaa.tar"
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    assert stat.S_IMODE(archive.parent.stat().st_mode) == 0o700
    with tarfile.open(archive) as tar:
        assert "record.json" in tar.getnames()
