"""The model's way to the hosts: what is asked of whom, in which order, and what is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.load import load
from cluster.model import hub_cache, place
from tests.conftest import CLUSTERS, Pyinfra, Run
from tests.fleet import Fleet

BASE = (CLUSTERS / "two-hosts.yaml").read_text(encoding="utf-8")


def roles(fleet: Fleet) -> list[tuple[str, str]]:
    """What was done about the model: (host, role), in order."""
    found = []
    for name, command in fleet.history:
        if "--name=vllm-hub" in command:
            found.append((name, "hub"))
        elif command.startswith("python3 - relay"):
            found.append((name, command.partition('"role": "')[2].partition('"')[0]))
    return found


def bring(run: Pyinfra, fleet: Fleet, *more: str, cluster: Path | None = None) -> Run:
    for host in fleet.hosts.values():
        host.image = {"id": "sha256:abc", "digests": []}
    del fleet.history[:]
    return run("-y", "tasks/model.py", *more, cluster=cluster or CLUSTERS / "two-hosts.yaml")


@pytest.fixture
def brought(run: Pyinfra, fleet: Fleet) -> Fleet:
    """Both hosts have the model."""
    run("-y", "deploy.py")
    return fleet


def test_the_head_downloads_and_the_others_get_it_from_there(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "tasks/image.py")
    result = bring(run, fleet)
    assert result.exit_code == 0, result.output
    done = roles(fleet)
    assert done[:3] == [("spark-1", "check"), ("spark-1", "hub"), ("spark-1", "manifest")]
    assert {("spark-1", "send"), ("spark-2", "receive")} < set(done[4:])
    assert fleet["spark-1"].relays == [["@fake/spark-2"]]
    assert fleet["spark-2"].model == fleet["spark-1"].model == "new"


def test_nothing_to_do_costs_one_command_per_host(run: Pyinfra, brought: Fleet) -> None:
    assert bring(run, brought).exit_code == 0
    looked = [(name, role) for name, role in roles(brought) if role != "drop"]
    assert sorted(looked) == [("spark-1", "check"), ("spark-2", "check")]
    assert brought["spark-1"].relays == [["@fake/spark-2"]]  # the first one


def test_a_host_that_lacks_something_gets_it(run: Pyinfra, brought: Fleet) -> None:
    brought["spark-2"].model = "half of it"
    assert bring(run, brought).exit_code == 0
    assert brought["spark-2"].model == brought["spark-1"].model
    assert ("spark-1", "hub") not in roles(brought)


def test_a_host_that_still_lacks_something_stops_the_deploy(run: Pyinfra, brought: Fleet) -> None:
    brought["spark-2"].model = "half of it"
    brought["spark-2"].failures['"role": "receive"'] = "the disk of /srv is full"
    result = bring(run, brought)
    assert result.exit_code == 1
    assert "the disk of /srv is full" in result.output
    assert "Traceback" not in result.output


def test_the_token_goes_to_the_heads_standard_input_alone(
    run: Pyinfra, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hf_secret")
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{BASE}\nsecrets: {{HF_TOKEN: {{env: MY_TOKEN}}}}\n", encoding="utf-8")
    run("-y", "tasks/image.py")
    result = bring(run, fleet, cluster=path)
    assert result.exit_code == 0, result.output
    assert "hf_secret" not in result.output
    assert all("hf_secret" not in command for _, command in fleet.history)
    assert [name for name, text in fleet.inputs if text.startswith("hf_secret\n")] == ["spark-1"]


def test_the_token_of_the_hub_is_in_no_file_of_a_host(
    run: Pyinfra, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hf_secret")
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{BASE}\nsecrets: {{HF_TOKEN: {{env: MY_TOKEN}}}}\n", encoding="utf-8")
    assert run("-y", "deploy.py", cluster=path).exit_code == 0
    for host in fleet.hosts.values():
        assert all("hf_secret" not in content for content in host.files.values())
        assert "/etc/vllm/secrets.env" not in host.files


def test_a_worker_alone_cannot_be_served(run: Pyinfra, brought: Fleet) -> None:
    brought["spark-2"].model = "half of it"
    result = bring(run, brought, "--limit", "workers")
    assert result.exit_code == 0  # there is nothing to compare with
    assert roles(brought) == [("spark-2", "drop")]


def test_shared_disks_are_left_alone(run: Pyinfra, fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    text = BASE.replace("model: Qwen/Qwen2.5-7B-Instruct", "model: {name: /srv/m, relay: false}")
    path.write_text(text, encoding="utf-8")
    run("-y", "tasks/image.py")
    assert bring(run, fleet, cluster=path).exit_code == 0
    assert {role for _, role in roles(fleet)} == {"check", "manifest", "drop"}
    assert {name for name, role in roles(fleet) if role != "drop"} == {"spark-1"}


def test_where_the_model_is(tmp_path: Path) -> None:
    cluster = load(CLUSTERS / "two-hosts.yaml")
    found = place(cluster)
    assert found.root == f"{hub_cache(cluster)}/models--Qwen--Qwen2.5-7B-Instruct"
    assert found.manifest.endswith("/relay/models--Qwen--Qwen2.5-7B-Instruct@main.json")
    path = tmp_path / "cluster.yaml"
    path.write_text(BASE.replace("Qwen/Qwen2.5-7B-Instruct", "/srv/models/big/"), encoding="utf-8")
    assert place(load(path)).root == "/srv/models/big"
