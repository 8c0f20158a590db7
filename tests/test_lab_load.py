"""A serving cluster under load, asked by the openai package: faults, a busy engine, a wrong key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest

from tests.faults import FAULTS, recover
from tests.lab import Lab
from tests.test_lab import containers, deploy, pyinfra, variant
from tests.test_lab_faults import PATIENT, QUICK

pytestmark = pytest.mark.lab

URL = "http://127.0.0.1:28000/v1"


@dataclass
class Load:
    """Clients that ask without a pause until they are stopped."""

    clients: int
    finished: list[float] = field(default_factory=list)
    """Seconds of every request that got its answer."""
    errors: list[tuple[float, str]] = field(default_factory=list)
    """Seconds until the error, and what it was."""
    key: str = "none"
    stopping: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for number in range(self.clients):
            thread = threading.Thread(target=self.ask, args=(number,), daemon=True)
            thread.start()
            self.threads.append(thread)

    def ask(self, number: int) -> None:
        client = openai.OpenAI(base_url=URL, api_key=self.key, max_retries=0, timeout=120)
        while not self.stopping.is_set():
            began = time.monotonic()
            try:
                client.completions.create(
                    model="tiny",
                    prompt=f"Client {number} of many",
                    max_tokens=200,
                    extra_body={"ignore_eos": True},
                )
                self.finished.append(time.monotonic() - began)
            except openai.OpenAIError as error:
                self.errors.append((time.monotonic() - began, f"{type(error).__name__}: {error}"))
                time.sleep(0.5)

    def stop(self, seconds: float = 150) -> None:
        """End it; every client has to come back."""
        self.stopping.set()
        end = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.1, end - time.monotonic()))
        assert not any(thread.is_alive() for thread in self.threads), "a request hangs"


def wait(condition: Callable[[], object], seconds: float, why: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, why
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["the worker's Ray is killed", "the head's Ray is killed"])
def test_requests_in_flight_end_with_an_error(lab: Lab, tmp_path: Path, name: str) -> None:
    deploy(variant(tmp_path, watchdog=QUICK, restarts=PATIENT))
    load = Load(clients=16)
    load.start()
    try:
        wait(lambda: len(load.finished) > 16, 120, "the load does not get going")
        before = len(load.errors)
        recover(lab, FAULTS[name])
        assert len(load.errors) > before
        # The longest that anybody waited for an error: the death has to be noticed first.
        assert max(seconds for seconds, _ in load.errors) < 60, load.errors
        done = len(load.finished)
        wait(lambda: len(load.finished) > done + 16, 120, "the same clients get no answer again")
    finally:
        load.stop()


@pytest.mark.slow
def test_a_busy_engine_is_left_alone_for_two_minutes(lab: Lab, tmp_path: Path) -> None:
    deploy(variant(tmp_path, watchdog={**QUICK, "deadline": 2}, restarts=PATIENT))
    before, since = containers(lab), time.time()
    load = Load(clients=96)  # eight at a time are computed
    load.start()
    try:
        time.sleep(120)
        assert containers(lab) == before
    finally:
        load.stop()
    argv = ("journalctl", "-u", "vllm-watchdog", "-o", "cat", f"--since=@{since:.0f}")
    said = lab.exec("spark-1", *argv)
    assert "healthy: busy: " in said
    assert "restarting" not in said
    assert not load.errors


@pytest.mark.slow
def test_a_wrong_key_is_no_wedge(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_API_KEY", "right")
    secrets = {"VLLM_API_KEY": {"env": "LAB_API_KEY"}}
    deploy(variant(tmp_path, watchdog=QUICK, restarts=PATIENT, secrets=secrets))
    before, since = containers(lab), time.time()
    lab.exec(
        "spark-1", "sed", "-i", "s/^VLLM_API_KEY=.*/VLLM_API_KEY=wrong/", "/etc/vllm/secrets.env"
    )
    time.sleep(40)
    argv = ("journalctl", "-u", "vllm-watchdog", "-o", "cat", f"--since=@{since:.0f}")
    said = lab.exec("spark-1", *argv)
    assert "unknown: cannot ask: HTTP 401" in said
    assert "restarting" not in said
    assert containers(lab) == before
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=URL, api_key="none", max_retries=0).models.list()


@pytest.mark.slow
def test_stop_lets_running_requests_finish_and_takes_no_new_ones(lab: Lab, tmp_path: Path) -> None:
    deploy(variant(tmp_path))
    load = Load(clients=4)
    load.start()
    try:
        wait(lambda: len(load.finished) > 4, 120, "the load does not get going")
        stopped = pyinfra("tasks/stop.py", cluster=variant(tmp_path))
        assert stopped.code == 0
    finally:
        load.stop()
    # Who was being served got an answer; who came later was refused, and soon.
    assert load.errors
    assert max(seconds for seconds, _ in load.errors) < 15, load.errors
    assert stopped.seconds < 40


@pytest.mark.slow
def test_a_vllm_that_cannot_drain_stops_behind_a_closed_door(lab: Lab, tmp_path: Path) -> None:
    """What a deploy writes for a vLLM before 0.18, with the one that the lab has."""
    deploy(variant(tmp_path))
    unit = "/etc/systemd/system/vllm-serve.service"
    lab.exec("spark-1", "sed", "-i", r"/^ExecStop=/s/refuses\\\": true/refuses\\\": false/", unit)
    assert 'refuses\\": false' in lab.exec("spark-1", "grep", "^ExecStop=", unit)
    lab.exec("spark-1", "systemctl", "daemon-reload")
    knock = "exec 3<> /dev/tcp/10.1.230.180/28000"

    def is_open() -> bool:
        return lab.exec("spark-1", "bash", "-c", f"({knock}) 2>&- && echo yes || true") != ""

    assert is_open()
    answers: list[int] = []

    def ask() -> None:
        client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)
        answer = client.completions.create(
            model="tiny", prompt="A long one", max_tokens=240, extra_body={"ignore_eos": True}
        )
        answers.append(answer.usage.completion_tokens if answer.usage else 0)

    client = threading.Thread(target=ask, daemon=True)
    client.start()
    time.sleep(1)
    lab.exec("spark-1", "systemctl", "stop", "--no-block", "vllm-serve")
    wait(lambda: not is_open(), 5, "the door stays open")
    assert not answers
    client.join(30)
    assert answers == [240]
    wait(lambda: "vllm-serve" not in str(containers(lab)), 15, "vllm serve still runs")
    assert "vllm serve" not in lab.exec("spark-1", "iptables", "-S", "INPUT")
