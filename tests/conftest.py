"""Fixtures: the real pyinfra CLI in this process, against hosts played by @fake."""

import pyinfra_cli  # noqa: F401 -- gevent patches the standard library; it has to come first

# isort: split
import logging
import os
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import gevent.monkey
import pyinfra
import pytest
from click.testing import CliRunner
from pyinfra.connectors.fake import FakeConnector
from pyinfra.context import ctx_inventory, ctx_state
from pyinfra_cli.main import cli

from tests.fleet import Fleet
from tests.lab import Lab, existing, up

ROOT = Path(__file__).parent.parent
CLUSTERS = ROOT / "tests" / "clusters"


@dataclass
class Run:
    """What a pyinfra run did, as its user and its hosts saw it."""

    exit_code: int
    output: str
    operations: list[str]
    commands: dict[str, list[str]]
    """Commands that each host got, by host name."""

    @property
    def changes(self) -> int:
        """How many operations changed a host."""
        return len(re.findall(r"\] (?:\x1b\[\d+m)?Success", self.output))


Pyinfra = Callable[..., Run]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Hosts that remember what was done to them."""
    fleet = Fleet()
    monkeypatch.setattr(
        FakeConnector,
        "run_shell_command",
        lambda self, command, **arguments: fleet.run(self.host.name, command, arguments),
    )
    return fleet


@pytest.fixture
def run(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pyinfra]:
    """pyinfra tests/fleet.py ARGUMENTS, for a cluster file."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(pyinfra, "is_cli", True)

    def call(
        *arguments: str,
        cluster: Path = CLUSTERS / "two-hosts.yaml",
        input: str | None = None,  # noqa: A002 -- click's own name for it
    ) -> Run:
        monkeypatch.setenv("CLUSTER", str(cluster))
        ctx_state.reset()
        ctx_inventory.reset()
        logging.getLogger("pyinfra").handlers.clear()  # each run adds its own
        before = {name: len(host.commands) for name, host in fleet.hosts.items()}
        result = CliRunner().invoke(cli, ["tests/fleet.py", *arguments], input=input)
        operations: list[str] = []
        if ctx_state.isset() and pyinfra.state.initialised:
            operations = [
                next(iter(pyinfra.state.get_op_meta(each).names))
                for each in pyinfra.state.get_op_order()
            ]
        commands = {
            name: host.commands[before.get(name, 0) :] for name, host in fleet.hosts.items()
        }
        return Run(result.exit_code, result.output, operations, commands)

    yield call
    ctx_state.reset()
    ctx_inventory.reset()


@pytest.fixture(scope="session")
def lab() -> Lab:
    """The lab, brought up if it is not."""
    return existing() or up()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the lab's hosts say of the minutes of a test that failed, where it failed."""
    report = yield
    running = existing() if report.failed and item.get_closest_marker("lab") else None
    for host in running.hosts if running else []:
        argv = ["journalctl", "--no-pager", "-o", "short-precise", f"--since=@{call.start:.0f}"]
        units = [f"--unit=vllm-{name}" for name in ("ray", "serve", "watchdog")]
        lines = running.exec(host, *argv, *units, check=False).splitlines()
        report.sections.append((f"journal of {host}", "\n".join(lines[-150:])))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Close files at once from here on: gevent's os.close waits for a loop that no longer turns."""
    os.close = gevent.monkey.get_original("os", "close")
