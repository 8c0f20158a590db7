"""Going back to what served before, on real hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import Lab
from tests.test_lab import completions, containers, deploy, pyinfra, variant

pytestmark = [pytest.mark.lab, pytest.mark.slow]


def test_a_deploy_that_fails_brings_back_what_served(
    lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> None:
    good = variant(tmp_path_factory.mktemp("good"), on_failure="rollback")
    deploy(good)
    expected, ray = completions(), containers(lab)["spark-1 vllm-ray"]
    bad = variant(
        tmp_path_factory.mktemp("bad"), on_failure="rollback", serve__flags={"no-such-flag": True}
    )
    result = pyinfra("deploy.py", cluster=bad)
    assert result.code == 1
    assert "unrecognized arguments: --no-such-flag" in result.output
    assert "this deploy failed, see above; the hosts are back at the deployment of" in result.output
    assert completions() == expected
    assert containers(lab)["spark-1 vllm-ray"] == ray  # it had not changed
    assert deploy(good).changed == []


def test_rollback_undoes_a_deploy_that_succeeded(
    lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = variant(tmp_path_factory.mktemp("before"), serve__max_model_len=230)
    after = variant(tmp_path_factory.mktemp("after"), serve__max_model_len=220)
    for cluster in (before, after):
        deploy(cluster)
    assert pyinfra("tasks/rollback.py", cluster=after).code == 0
    argv = lab.exec("spark-1", "docker", "inspect", "-f", "{{.Args}}", "vllm-serve")
    assert "--max-model-len=230" in argv
    assert deploy(before).changed == []


def test_nothing_to_go_back_to(lab: Lab, tmp_path: Path) -> None:
    pyinfra("tasks/stop.py")
    result = pyinfra("tasks/rollback.py", cluster=variant(tmp_path))
    assert result.code == 1
    assert "nothing to go back to" in result.output
    assert "Traceback" not in result.output
