"""A model from the hub: downloaded once, by the image's own client, on the head; then relayed.

The hub is the tests' own, in the head's network: it speaks the hub's protocol and gates its model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.test_lab import ROOT, completions, deploy, pyinfra, variant

pytestmark = [pytest.mark.lab, pytest.mark.slow]

TOKEN = "hf_labtoken"
SERVER = f"""
import pathlib, sys, time
sys.path.insert(0, "/srv")
from fake_hub import running
with running() as hub:
    folder = pathlib.Path("/srv/models/tiny")
    files = {{path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}}
    hub.tokens.add("{TOKEN}")
    hub.model("lab/tiny", files, is_gated=True, readers={{"{TOKEN}"}})
    pathlib.Path("/srv/hub.url").write_text(hub.url)
    time.sleep(3600)
"""
CACHE = "/var/lib/vllm/cache/huggingface/hub/models--lab--tiny"


@pytest.fixture
def hub(lab: Lab) -> Iterator[str]:
    """The URL of a hub on the head."""
    program = (ROOT / "tests" / "fake_hub.py").read_text(encoding="utf-8")
    for path, text in (("/srv/fake_hub.py", program), ("/srv/hub.py", SERVER)):
        lab.exec("spark-1", "sh", "-c", 'printf %s "$1" > "$0"', path, text)
    for host in lab.hosts:
        lab.exec(host, "rm", "-rf", CACHE)
    lab.exec("spark-1", "sh", "-c", "rm -f /srv/hub.url; systemctl stop lab-hub 2>/dev/null; true")
    lab.exec("spark-1", "systemd-run", "--unit=lab-hub", "--collect", "python3", "/srv/hub.py")
    for _ in range(50):
        url = lab.exec("spark-1", "cat", "/srv/hub.url", check=False).strip()
        if url:
            break
        time.sleep(0.2)
    yield url
    lab.exec("spark-1", "systemctl", "stop", "lab-hub")


def test_a_gated_model_is_downloaded_once_and_served(
    lab: Lab, hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy()
    expected = completions()
    env = {
        **{"VLLM_CPU_KVCACHE_SPACE": 1, "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        **{"OMP_NUM_THREADS": 1, "HF_ENDPOINT": hub},
    }
    refused = pyinfra("tasks/model.py", cluster=variant(tmp_path, model="lab/tiny", env=env))
    assert refused.code == 1
    assert "gated" in refused.output
    assert "HF_TOKEN" in refused.output
    assert "Traceback" not in refused.output

    monkeypatch.setenv("LAB_HUB_TOKEN", TOKEN)
    secrets = {"HF_TOKEN": {"env": "LAB_HUB_TOKEN"}}
    cluster = variant(tmp_path, model="lab/tiny", env=env, secrets=secrets)
    result = deploy(cluster)
    assert TOKEN not in result.output
    assert completions() == expected
    for host in lab.hosts:
        snapshots = lab.exec(host, "ls", f"{CACHE}/snapshots").split()
        assert len(snapshots) == 1
        link = f"{CACHE}/snapshots/{snapshots[0]}/config.json"
        assert lab.exec(host, "readlink", link).startswith("../../blobs/")
        kept = lab.exec(host, "sh", "-c", f"grep -rl {TOKEN} /etc/vllm /var/lib/vllm || true")
        assert kept == ""
    # The hub is not asked again.
    lab.exec("spark-1", "systemctl", "stop", "lab-hub")
    assert deploy(cluster).changed == []
    lab.exec("spark-1", "systemd-run", "--unit=lab-hub", "--collect", "python3", "/srv/hub.py")
