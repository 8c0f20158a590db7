"""Deleting an old image, from both of Docker's image stores."""

from __future__ import annotations

import pytest

from tests.lab import Lab
from tests.test_lab import deploy, pyinfra

pytestmark = pytest.mark.lab

REPOSITORY = "registry.lab:5000/vllm-cpu"
CURRENT, OLD = f"{REPOSITORY}:lab", f"{REPOSITORY}:old"
MAKE_OLD = """
container=$(docker create "$0" true)
docker commit --change "LABEL age=old" "$container" "$1" > /dev/null
docker rm "$container" > /dev/null
"""


def images(lab: Lab) -> list[set[str]]:
    """The names of each host's images."""
    listed = ("docker", "images", "--format", "{{.Repository}}:{{.Tag}}", REPOSITORY)
    return [set(lab.exec(host, *listed).split()) for host in lab.hosts]


def test_only_what_is_named_and_not_in_use_goes(lab: Lab) -> None:
    deploy()
    for host in lab.hosts:
        lab.exec(host, "sh", "-ec", MAKE_OLD, CURRENT, OLD)
    assert images(lab) == [{CURRENT, OLD}] * 2

    shown = pyinfra("tasks/prune.py")
    assert shown.code == 0
    assert images(lab) == [{CURRENT, OLD}] * 2
    in_use = pyinfra("tasks/prune.py", "--data", f"delete={CURRENT}")
    assert in_use.code == 1
    assert "is in use" in in_use.output
    unknown = pyinfra("tasks/prune.py", "--data", f"delete={OLD},nonsense")
    assert unknown.code == 1
    assert "no host has 'nonsense'" in unknown.output
    assert images(lab) == [{CURRENT, OLD}] * 2

    assert pyinfra("tasks/prune.py", "--data", f"delete={OLD}").code == 0
    assert images(lab) == [{CURRENT}] * 2
    assert deploy().changed == []
