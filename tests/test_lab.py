"""End to end: the real CLI against the lab's hosts, with real Ray and real vLLM.

The tests share two hosts. Each brings them to the state that it needs with a deploy of its own,
which costs little where the state is there already, and says what it changed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab import Lab

pytestmark = pytest.mark.lab

ROOT = Path(__file__).parent.parent
BASE = ROOT / "tests" / "lab" / "cluster.yaml"
OURS = [
    "/etc/vllm",
    "/etc/systemd/system/vllm-watchdog.*",
    "/etc/systemd/system/vllm-ray.service",
    "/etc/systemd/system/vllm-serve.service",
]
PROMPTS = ["Hello", "The cable carries", "Ray lists two"]


@dataclass
class Result:
    """A finished pyinfra run."""

    code: int
    output: str
    seconds: float

    @property
    def changed(self) -> list[str]:
        """What operations changed a host: "spark-1 Success" lines, by operation."""
        found, operation = [], ""
        for line in self.output.splitlines():
            if match := re.search(r"Starting operation: (.*?)\s*$", line):
                operation = match[1].split(" | ")[-1]
            if match := re.search(r"\[(\S+)\] Success", line):
                found.append(f"{match[1]}: {operation}")
        return found


def command(*files: str) -> list[str]:
    return [sys.executable, "-m", "pyinfra", "-y", "inventory.py", *files]


def environment(cluster: Path) -> dict[str, str]:
    return {**os.environ, "CLUSTER": str(cluster), "NO_COLOR": "1"}


def pyinfra(*arguments: str, cluster: Path = BASE, timeout: float = 600) -> Result:
    began = time.monotonic()
    done = subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env=environment(cluster),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    output = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", done.stdout)
    print(output)
    return Result(done.returncode, output, time.monotonic() - began)


def deploy(cluster: Path = BASE) -> Result:
    result = pyinfra("deploy.py", cluster=cluster)
    assert result.code == 0, result.output
    return result


def variant(folder: Path, **changes: Any) -> Path:
    """The lab's cluster file with some values changed; keys joined by "__"."""
    values = yaml.safe_load(BASE.read_text(encoding="utf-8"))
    for path, value in changes.items():
        section = values
        *parents, last = path.replace("spark_", "spark-").split("__")
        for key in parents:
            section = section.setdefault(key, {})
        section[last] = value
    target = folder / "cluster.yaml"
    target.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return target


def completions() -> list[str]:
    """What a client on this machine gets, through the published port."""
    texts = []
    for prompt in PROMPTS:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}
        request = urllib.request.Request(
            "http://127.0.0.1:28000/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            texts.append(json.load(answer)["choices"][0]["text"])
    return texts


def containers(lab: Lab) -> dict[str, str]:
    """{"spark-1 vllm-ray": container id}"""
    found = {}
    for host in lab.hosts:
        listed = lab.exec(
            host, "docker", "ps", "-a", "--no-trunc", "--format", "{{.Names}} {{.ID}}"
        )
        for line in listed.splitlines():
            name, identity = line.split()
            found[f"{host} {name}"] = identity
    return found


def begun(lab: Lab, host: str, container: str) -> str:
    return lab.exec(host, "docker", "inspect", "-f", "{{.State.StartedAt}}", container).strip()


def nothing_left(lab: Lab) -> None:
    assert containers(lab) == {}
    for host in lab.hosts:
        assert lab.exec(host, "docker", "volume", "ls", "-q") == ""
        assert lab.exec(host, "sh", "-c", f"ls -d {' '.join(OURS)} 2>/dev/null || true") == ""
        units = lab.exec(host, "systemctl", "list-units", "--all", "--no-legend", "vllm-*")
        assert units == ""


def test_from_nothing_to_a_completion(lab: Lab) -> None:
    pyinfra("tasks/stop.py")
    nothing_left(lab)
    result = deploy()
    for phase in ("rendezvous at 192.168.200.12", "weights", "KV cache", "listens"):
        assert phase in result.output
    assert re.search(r"answer +'.+' \(\d+ tokens", result.output)
    assert "http://127.0.0.1:28000/v1" in result.output
    assert set(containers(lab)) == {
        *("spark-1 vllm-ray", "spark-1 vllm-serve", "spark-2 vllm-ray"),
    }


def test_a_second_run_changes_nothing(lab: Lab) -> None:
    deploy()
    before = containers(lab)
    result = deploy()
    assert result.changed == []
    assert containers(lab) == before


def test_docker_reads_every_value_back(lab: Lab, tmp_path: Path) -> None:
    values = {
        "SPACES": "  a  b ",
        "QUOTES": "\"x\" 'y' `z`",
        "SHELL": "$HOME ${PATH} $(id) \\n",
        "PERCENT": "100 %i %%",
        "HASH": "# no comment",
        "EQUALS": "a=b=c",
        "UNICODE": "Grüße, 東京, 🚀",
        "EMPTY": "",
    }
    cluster = variant(tmp_path, hosts__spark_2__env=values)
    result = pyinfra("tasks/environment.py", cluster=cluster)
    assert result.code == 0
    # The image is pinned to its id in the unit; its tag is the same image here.
    image = yaml.safe_load(BASE.read_text(encoding="utf-8"))["image"]["name"]
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    seen = json.loads(
        lab.exec(
            "spark-2",
            *("docker", "run", "--rm", "--env-file", "/etc/vllm/node.env"),
            *("--entrypoint", "python3", image, "-c", program),
        )
    )
    assert {key: seen.get(key) for key in values} == values
    assert seen["VLLM_HOST_IP"] == "192.168.200.13"


def test_a_changed_serve_flag_restarts_serve_alone(lab: Lab, tmp_path: Path) -> None:
    deploy()
    before = containers(lab)
    cluster = variant(tmp_path, serve__max_model_len=128)
    result = deploy(cluster)
    after = containers(lab)
    *steps, one, other = result.changed
    assert steps == [
        "spark-1: Write env files and units",
        "spark-1: Stop vllm serve if its group changes",
        "spark-1: Start vllm serve",
    ]
    kept = [f"{host}: Keep this deployment as known to be good" for host in lab.hosts]
    assert sorted([one, other]) == kept
    assert {key for key in after if after[key] != before[key]} == {"spark-1 vllm-serve"}


def test_a_changed_worker_restarts_the_group_in_order(lab: Lab, tmp_path: Path) -> None:
    """From whatever runs: the worker's Ray first, then vllm serve; the head's Ray stays."""
    before = containers(lab)
    cluster = variant(tmp_path, hosts__spark_2__env={"NCCL_DEBUG": "WARN"})
    deploy(cluster)
    after = containers(lab)
    assert {key for key in after if after[key] != before[key]} == {
        "spark-2 vllm-ray",
        "spark-1 vllm-serve",
    }
    assert begun(lab, "spark-2", "vllm-ray") < begun(lab, "spark-1", "vllm-serve")


@pytest.mark.parametrize(("number", "length"), [("SIGKILL", 200), ("SIGINT", 210)])
def test_an_interrupted_run_is_finished_by_the_next(
    lab: Lab, tmp_path: Path, number: str, length: int
) -> None:
    cluster = variant(tmp_path, serve__max_model_len=length)
    process = subprocess.Popen(
        command("deploy.py"),
        cwd=ROOT,
        env=environment(cluster),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        # The files are written; nothing has been restarted yet.
        if "Stop vllm serve if its group changes" in line:
            process.send_signal(getattr(signal, number))
            break
    assert process.wait(timeout=30) not in {0, None}
    unit = lab.exec("spark-1", "cat", "/etc/systemd/system/vllm-serve.service")
    assert f"--max-model-len={length}" in unit
    deploy(cluster)
    argv = lab.exec("spark-1", "docker", "inspect", "-f", "{{.Args}}", "vllm-serve")
    assert f"--max-model-len={length}" in argv
    assert deploy(cluster).changed == []


def test_a_wrong_interface_stops_before_vllm_starts(lab: Lab, tmp_path: Path) -> None:
    before = containers(lab)
    cluster = variant(tmp_path, hosts__spark_2__fabric__interface="office0")
    result = pyinfra("deploy.py", cluster=cluster)
    assert result.code == 1
    assert "fabric-address: the fabric address 192.168.200.13 is on interface fabric0" in (
        result.output
    )
    assert "set hosts.spark-2.fabric.interface: fabric0" in result.output
    assert "Start vllm serve" not in result.output
    assert "Traceback" not in result.output
    assert containers(lab) == before


def test_a_server_that_dies_ends_the_wait_with_its_last_words(lab: Lab, tmp_path: Path) -> None:
    cluster = variant(tmp_path, serve__flags={"no-such-flag": True})
    result = pyinfra("deploy.py", cluster=cluster)
    assert result.code == 1
    assert "unrecognized arguments: --no-such-flag" in result.output
    assert "vllm-serve: it ended" in result.output
    assert "Traceback" not in result.output
    assert result.seconds < 90


def test_a_deadline_says_where_the_start_is_and_the_next_run_waits_on(
    lab: Lab, tmp_path: Path
) -> None:
    result = pyinfra("deploy.py", cluster=variant(tmp_path, deadlines__serve=10))
    assert result.code == 1
    assert "not ready after 10 s; it is at: " in result.output
    before = containers(lab)
    deploy()
    assert containers(lab) == before  # it waited for the start that was under way


def test_stop_leaves_nothing_and_can_be_repeated(lab: Lab) -> None:
    deploy()
    assert pyinfra("tasks/stop.py").code == 0
    nothing_left(lab)
    again = pyinfra("tasks/stop.py")
    assert again.code == 0
    assert again.changed == []


def test_task_by_task_equals_the_deploy_and_tp_2_equals_tp_1(lab: Lab, tmp_path: Path) -> None:
    pyinfra("tasks/stop.py")
    # One rank: the head alone.
    values = yaml.safe_load(BASE.read_text(encoding="utf-8"))
    del values["hosts"]["spark-2"]
    one = tmp_path / "one.yaml"
    one.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    deploy(one)
    alone = completions()
    assert pyinfra("tasks/stop.py", cluster=one).code == 0
    nothing_left(lab)

    steps = (
        "image",
        "model",
        "environment",
        "ray_head",
        "ray_workers",
        "serve",
        "verify",
        "keep",
        "status",
    )
    for task in steps:
        assert pyinfra(f"tasks/{task}.py").code == 0
    assert deploy().changed == []
    assert completions() == alone
    ranks = lab.exec("spark-2", "sh", "-c", "ps ax | grep -c '[R]ayWorkerProc'")
    assert int(ranks) >= 1


@pytest.mark.slow
def test_without_ray(lab: Lab, tmp_path: Path) -> None:
    """vLLM's own multi-node mode, from a running Ray deployment and back."""
    deploy()
    with_ray = completions()
    deploy(variant(tmp_path, executor="mp"))
    assert set(containers(lab)) == {"spark-1 vllm-serve", "spark-2 vllm-serve"}
    assert completions() == with_ray
    assert deploy(variant(tmp_path, executor="mp")).changed == []
    deploy()
    assert completions() == with_ray
