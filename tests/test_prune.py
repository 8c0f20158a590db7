"""tasks/prune.py: shows what is stored, and deletes only what was named and nothing uses."""

from __future__ import annotations

from tests.conftest import Pyinfra
from tests.fleet import Fleet

NAME = "vllm/vllm-openai"


def test_it_shows_and_deletes_nothing(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    result = run("-y", "tasks/prune.py")
    assert result.exit_code == 0, result.output
    assert f"{NAME}:old" in result.output
    assert "--data delete=unused" in result.output
    assert all(host.deletions == [] for host in fleet.hosts.values())


def test_what_is_named_goes_on_all_hosts(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    result = run("-y", "tasks/prune.py", "--data", f"delete={NAME}:old")
    assert result.exit_code == 0, result.output
    assert [fleet[name].deletions for name in ("spark-1", "spark-2")] == [["old"], ["old"]]


def test_what_is_in_use_or_kept_for_a_rollback_stays(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    for host in fleet.hosts.values():
        host.kept[0]["record"]["image"] = "kept"
    run("-y", "tasks/prune.py", "--data", "delete=unused")
    assert [fleet[name].deletions for name in ("spark-1", "spark-2")] == [["old"], ["old"]]
    refused = run("-y", "tasks/prune.py", "--data", f"delete={NAME}:new")
    assert refused.exit_code == 1
    assert "is in use" in refused.output
    assert "Traceback" not in refused.output


def test_a_name_that_no_host_has_deletes_nothing(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    refused = run("-y", "tasks/prune.py", "--data", f"delete={NAME}:old,nonsense")
    assert refused.exit_code == 1
    assert "no host has 'nonsense'" in refused.output
    assert all(host.deletions == [] for host in fleet.hosts.values())
