"""What pyinfra operations share: who takes part, output while it comes, how they fail."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Generator
from functools import cache, wraps
from typing import Any, ParamSpec

import click
from pyinfra import host, logger, state
from pyinfra.api import FunctionCommand, Host, State, StringCommand
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS
from pyinfra.api.command import PyinfraCommand

from cluster import encryption, observed
from cluster.settings import Cluster

Commands = Generator[PyinfraCommand, None, None]
Parameters = ParamSpec("Parameters")


def guarded(function: Callable[Parameters, Commands]) -> Callable[Parameters, Commands]:
    """Have an operation fail with a sentence, not a traceback, where a host cannot be read."""

    @wraps(function)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Commands:
        try:
            yield from function(*args, **kwargs)
        except observed.UnreadableError as error:
            yield refuse(str(error))

    return guarded


def active() -> dict[str, Host]:
    """The hosts that take part in this run and have not failed, by name."""
    return {each.name: each for each in state.inventory.get_active_hosts()}


def reporter(cluster: Cluster) -> str:
    """The host that speaks for the run: the head, or the first host where it takes no part."""
    names = active()
    return cluster.head if cluster.head in names else min(names)


@cache
def shared_ports(purpose: str) -> tuple[int, ...]:  # noqa: ARG001 -- another purpose, other ports
    """Four ports for one transfer of this run, the same on all hosts.

    Below what the kernel gives away (32768) and above what Ray takes (10002 to 19999).
    """
    return tuple(random.sample(range(20000, 32768), 4))


@cache
def transfer_secrets(encrypt: bool) -> dict[str, str]:
    """What the hosts of this run know each other by in its transfers; new ones for every run."""
    known = {"token": secrets.token_hex(16)}
    if encrypt:
        known["certificate"] = encryption.certificate().get_secret_value()
    return known


def connector_arguments() -> dict[str, Any]:
    """How the current operation runs its commands: sudo and the like."""
    return {
        key: value
        for key, value in (host.current_op_global_arguments or {}).items()
        if key in CONNECTOR_ARGUMENT_KEYS
    }


def streamed(command: StringCommand, stdin: str | None = None) -> FunctionCommand:
    """A command whose output is shown while it runs."""
    arguments = connector_arguments()
    if stdin is not None:
        arguments["_stdin"] = stdin
    return FunctionCommand(_stream, (command, arguments), {})


def _stream(state: State, host: Host, command: StringCommand, arguments: dict[str, Any]) -> bool:
    status, _ = host.run_shell_command(
        command, print_output=True, print_input=state.print_input, **arguments
    )
    return bool(status)


def refuse(*lines: str) -> FunctionCommand:
    """A command that fails and says why; raising in an operation would print a traceback."""
    return FunctionCommand(_fail, lines, {})


def _fail(state: State, host: Host, *lines: str) -> bool:  # noqa: ARG001 -- pyinfra passes both
    for line in lines:
        logger.error(f"{host.print_prefix}{click.style(line, fg='red')}")
    return False


def print_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print rows on stderr."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in header:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(stderr=True, soft_wrap=False).print(table)
