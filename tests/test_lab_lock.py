"""Two people at once: the second is told who works on the cluster; a killed run leaves no lock."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.test_lab import ROOT, command, environment, pyinfra, variant

pytestmark = pytest.mark.lab


def test_the_second_run_is_refused_until_the_first_is_gone(lab: Lab, tmp_path: Path) -> None:
    pyinfra("tasks/stop.py")
    first = subprocess.Popen(
        command("deploy.py"),
        cwd=ROOT,
        env=environment(variant(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert first.stdout is not None
        for line in first.stdout:
            if "Read what the head runs" in line:
                break
        first.send_signal(signal.SIGSTOP)
        second = pyinfra("tasks/stop.py")
        assert second.code == 1
        assert "another run works on this cluster" in second.output
        assert "deploy.py" in second.output
        assert "Traceback" not in second.output
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait(timeout=30)
    time.sleep(2)
    assert pyinfra("tasks/stop.py").code == 0
