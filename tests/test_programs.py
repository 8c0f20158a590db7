"""Programs of several modules as one text."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from cluster.programs import keyed, source


def run(text: str, *argv: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a text as a host does, which has no module of ours."""
    command = [sys.executable, "-I", "-", *argv]
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=folder)


def test_a_program_of_one_module_is_its_file() -> None:
    path = files("cluster.remote").joinpath("reach.py")
    assert source("reach") == path.read_text(encoding="utf-8")


def test_a_program_of_several_modules_needs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    wanted = {"role": "manifest", "root": str(tmp_path / "model")}
    ended = run(source("relay"), "relay", json.dumps(wanted), folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(ended.stdout)["files"] == 1


def test_secrets_are_in_the_text_whatever_they_contain(tmp_path: Path) -> None:
    secrets = {"token": "a'b\"c\\\n${x}", "certificate": "line\nline\n"}
    text = keyed(source("registry"), secrets)
    show = "\nimport cluster.remote.wire as wire, json; print(json.dumps(wire.SECRETS))\n"
    before = text.rsplit("\nexec(", 1)[0]
    ended = run(before + show, folder=tmp_path)
    assert json.loads(ended.stdout) == secrets
    with pytest.raises(ValueError, match="takes no secrets"):
        keyed(source("reach"), secrets)
