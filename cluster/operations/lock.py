"""pyinfra operation that holds a lock on the head: two people's runs must not interleave."""

from __future__ import annotations

import getpass
import json
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from pyinfra import host, state
from pyinfra.api import Host, QuoteString, StringCommand, operation
from pyinfra.api.arguments import ConnectorArguments
from pyinfra.connectors.util import extract_control_arguments, make_unix_command_for_host

from cluster import observed
from cluster.memory import remembered
from cluster.observed import UnreadableError
from cluster.programs import source
from cluster.shell import Commands, connector_arguments, guarded, refuse

LOCK_PATH = "/run/vllm-deploy.lock"


@dataclass
class _Memory:
    """The streams of the program that holds the lock."""

    lock: Any = None


_memory = partial(remembered, _Memory)


@operation()
@guarded
def locked(take_over: bool = False) -> Commands:
    """Hold the lock of the cluster on this host until this run ends; stop if somebody else has it.

    + take_over: take it from whoever has it
    """
    if state.is_executing:
        holder = _taken(host, take_over, connector_arguments())
        if holder is not None:
            yield refuse(
                f"another run works on this cluster: {holder.get('who', 'unknown')}, since "
                f"{holder.get('since', 'unknown')}, with: {holder.get('command', 'unknown')}",
                "Wait for it, or take the lock from it: --data take_over=true",
            )
            return
    host.noop("this run has the lock")


def _taken(host: Host, take_over: bool, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Hold the lock on a host for as long as this run is connected to it.

    `arguments` are pyinfra's for a command there (sudo). Return None where this run has the lock,
    else who has it. Raises UnreadableError.
    """
    memory = _memory(host)
    client = getattr(host.connector, "client", None)
    if memory.lock is not None or client is None:  # no ssh, nobody else
        return None
    wanted = {
        "path": LOCK_PATH,
        "take_over": take_over,
        "holder": {
            "who": f"{getpass.getuser()} on {socket.gethostname()}",
            "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "command": " ".join(sys.argv)[:200],
        },
    }
    program = StringCommand(
        "python3", "-c", QuoteString(source("lock")), QuoteString(json.dumps(wanted))
    )
    extract_control_arguments(cast(ConnectorArguments, arguments))
    if not observed.sudo_would_ask_nobody(host):
        # pyinfra asks for a sudo password when a command needs it; the one below could not.
        host.run_shell_command(StringCommand("true"), **arguments)
    command = make_unix_command_for_host(state, host, program, **arguments).get_raw_value()
    # Not through pyinfra: it closes stdin, and this has to stay open until the run ends.
    memory.lock = client.exec_command(command)
    line = memory.lock[1].readline()
    try:
        holder: dict[str, Any] | None = json.loads(line)["held_by"]
    except (ValueError, KeyError, TypeError):
        complaint = memory.lock[2].read().decode(errors="replace").strip()
        memory.lock = None
        remedy = "; give it with --same-sudo-password" if "password" in complaint else ""
        raise UnreadableError(
            f"{host.name}: the lock could not be taken: {complaint}{remedy}"
        ) from None
    if holder is not None:
        memory.lock = None
    return holder
