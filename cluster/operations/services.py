"""pyinfra operations for env files, units and what they run.

Long waits run on the host, with a deadline, progress lines and a reason at the end.
"""

from __future__ import annotations

import difflib

import click
from pyinfra import host, logger, state
from pyinfra.api import QuoteString, StringCommand, operation

from cluster import commands, node, observed
from cluster.fabric import fabric_problem
from cluster.facts import RayNodes, ReachesRay, program_command
from cluster.host_state import HostState
from cluster.node import File
from cluster.programs import source
from cluster.settings import Cluster
from cluster.shell import Commands, guarded, refuse, streamed
from cluster.tables import log_patterns, table

_QUIETLY = (">/dev/null", "2>&1", "||", "true")


@operation()
@guarded
def rendered(cluster: Cluster) -> Commands:
    """Have the env files and units of this host as cluster.yaml says.

    Stops where the host does not have the fabric address that they would carry.

    + cluster: the cluster
    """
    found, wanted = observed.look(host), observed.wanted(host)
    problem = fabric_problem(cluster, host.name, found.addresses)
    if problem:
        yield refuse(f"{host.name}: {problem[0]}", problem[1])
        return
    stale = [file for file in wanted.files if not _is_current(file, found)]
    paths = {file.path for file in wanted.files}
    leftover = [path for path, content in found.files.items() if content and path not in paths]
    leftover += [
        path for path, digest in found.secret_files.items() if digest and path not in paths
    ]
    if state.config.DIFF and (not state.is_executing or not state.check_for_changes):
        for file in stale:
            _show_diff(file, found)
    for file in stale:
        yield _written(file, cluster)
    units = {node.unit_path(unit): unit for unit in node.UNITS}
    for path in leftover:
        if path in units:  # the host has another role now, or the watchdog is off
            yield StringCommand(
                "systemctl", "disable", "--quiet", "--now", observed.full_unit(units[path])
            )
    if leftover:
        yield StringCommand("rm", "-f", *map(QuoteString, leftover))
    changed = [*leftover, *(file.path for file in stale)]
    # An interrupted run may have written a unit without telling systemd.
    untold = any(found.unit(unit, "NeedDaemonReload") == "yes" for unit in found.units)
    if untold or any(path in units for path in changed):
        yield StringCommand("systemctl", "daemon-reload")
    if changed or untold:
        observed.forget(host)
    else:
        host.noop("files are current")


def _is_current(file: File, found: HostState) -> bool:
    if file.is_secret:
        return found.secret_files.get(file.path) == file.sha256
    return found.files.get(file.path) == file.content


def _written(file: File, cluster: Cluster) -> StringCommand:
    """A command that writes a file from stdin, in one step, never readable for others meanwhile."""
    fresh = QuoteString(f"{file.path}.new")
    make = ("mkdir", "-p", "-m", "0755", QuoteString(cluster.paths.config), "&&")
    return StringCommand(
        *("umask", "077", "&&", *make, "cat", ">", fresh, "&&"),
        *("chmod", f"{file.mode:o}", fresh, "&&", "mv", fresh, QuoteString(file.path)),
        _stdin=file.content,
    )


def _show_diff(file: File, found: HostState) -> None:
    if file.is_secret:
        logger.info(f"{host.print_prefix}{file.path}: secrets differ (not shown)")
        return
    before = (found.files.get(file.path) or "").splitlines()
    lines = difflib.unified_diff(
        before, file.content.splitlines(), file.path, file.path, n=1, lineterm=""
    )
    for line in lines:
        colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
        logger.info(f"{host.print_prefix}{click.style(line, fg=colour)}")


@operation()
@guarded
def paused() -> Commands:
    """Stop vllm serve on this host where it, or Ray below it anywhere, is about to change."""
    found = observed.look(host)
    container = found.containers.get(commands.SERVE)
    definition = observed.wanted(host).definitions.get(commands.SERVE)
    is_active = found.unit(commands.SERVE, "ActiveState") in {"active", "activating"}
    if not is_active or (container is not None and container.definition == definition):
        host.noop("vllm serve does not run, or runs as it should")
        return
    yield StringCommand("systemctl", "stop", f"{commands.SERVE}.service")
    observed.forget(host)


@operation(is_idempotent=False)
@guarded
def restarting(cluster: Cluster) -> Commands:
    """Have the operations behind this one start every unit of this host anew.

    + cluster: the cluster
    """
    observed.restart(host, node.containers(cluster, host.name))
    if commands.SERVE in node.containers(cluster, host.name):
        yield StringCommand("systemctl", "stop", f"{commands.SERVE}.service")
        observed.forget(host)


@operation()
@guarded
def running(cluster: Cluster, unit: str, ready: str, deadline: int) -> Commands:
    """Have a unit run the wanted container, and wait until it is ready.

    + cluster: the cluster
    + unit: vllm-ray or vllm-serve
    + ready: the key in phases.yaml that tells its progress
    + deadline: seconds
    """
    found = observed.look(host)
    # A rank cannot rejoin a group: what stood on a Ray that has started anew starts anew, too.
    is_current = observed.runs(host, unit) and not (
        unit == commands.SERVE and observed.ray_restarted()
    )
    listens = unit == commands.SERVE and host.name == cluster.head
    if is_current and (found.listening or not listens):
        host.noop(f"{unit} runs as wanted")
        return
    if not is_current:
        if unit == commands.RAY:
            observed.note_ray_restart(host)
        service = f"{unit}.service"
        yield StringCommand("systemctl", "stop", service)
        yield StringCommand("systemctl", "reset-failed", service, "2>/dev/null", "||", "true")
        yield StringCommand("systemctl", "enable", "--quiet", service)
        yield StringCommand("systemctl", "start", "--no-block", service)
        observed.started(host, unit)
    progress = table("phases")[ready]
    wanted = {
        "unit": unit,
        "deadline": deadline,
        "phases": [{key: row[key] for key in ("text", "pattern")} for row in progress["phases"]],
        "ready": progress["ready"],
        **log_patterns(),
        "port": ["127.0.0.1", cluster.serve.port] if listens else None,
    }
    yield streamed(program_command("wait_unit", wanted), source("wait_unit"))
    observed.forget(host)


@operation()
@guarded
def watched(timers: list[str]) -> Commands:
    """Have timers running on this host.

    + timers: of node.TIMERS
    """
    found = observed.look(host)
    for timer in timers:
        is_on = found.unit(timer, "ActiveState") == "active"
        is_enabled = found.unit(timer, "UnitFileState") == "enabled"
        if is_on and is_enabled:
            host.noop(f"{timer} is as it should be")
            continue
        yield StringCommand("systemctl", "enable", "--quiet", "--now", timer)
        observed.forget(host)


@operation()
@guarded
def head_reached(cluster: Cluster, unless_serving: bool = False) -> Commands:
    """Stop unless this host reaches Ray's head over the fabric.

    + cluster: the cluster
    + unless_serving: not where vllm serve runs as wanted: the completion at the end proves more
    """
    if not state.is_executing or (unless_serving and observed.serves(cluster)):
        host.noop("checked at run time, or proven by what runs")
        return
    wanted = commands.reach(cluster, host.name)
    problem = host.get_fact(ReachesRay, wanted=wanted, _stdin=source("reach"))
    if problem:
        yield refuse(*problem.splitlines())
        return
    host.noop(f"reaches {cluster.gcs_address}")


@operation()
@guarded
def nodes_listed(cluster: Cluster, unless_serving: bool = False) -> Commands:
    """Wait until Ray lists every node, each under its fabric address, with all its GPUs.

    + cluster: the cluster
    + unless_serving: see head_reached
    """
    if not state.is_executing or (unless_serving and observed.serves(cluster)):
        host.noop("checked at run time, or proven by what runs")
        return
    program = source("ray_nodes")
    if not host.get_fact(RayNodes, arguments=commands.ray_nodes(cluster, 0), _stdin=program):
        host.noop(f"Ray lists {len(cluster.nodes)} nodes")
        return
    arguments = commands.ray_nodes(cluster, cluster.deadlines.ray)
    yield streamed(StringCommand(*map(QuoteString, arguments)), program)


@operation()
@guarded
def stopped(units: list[str]) -> Commands:
    """Have units stopped, in this order, and not started at boot, and their containers gone.

    + units: of node.UNITS
    """
    found = observed.look(host)
    for unit in units:
        is_loaded = found.has_unit(unit)
        if is_loaded:
            yield StringCommand(
                "systemctl", "disable", "--quiet", "--now", observed.full_unit(unit)
            )
        if is_loaded or unit in found.containers:
            is_container = unit in (commands.RAY, commands.SERVE)
            if is_container:
                yield StringCommand("docker", "rm", "--force", unit, *_QUIETLY)
            observed.forget(host)
    host.noop("nothing of it is here")


@operation()
@guarded
def removed(cluster: Cluster) -> Commands:
    """Have no file of ours on this host; caches and models stay.

    + cluster: the cluster
    """
    found = observed.look(host)
    ours = [path for path, content in found.files.items() if content is not None]
    ours += [path for path, digest in found.secret_files.items() if digest is not None]
    if not ours:
        host.noop("no file of ours is here")
        return
    yield StringCommand("rm", "-f", *map(QuoteString, ours))
    yield StringCommand("rm", "-rf", QuoteString(commands.known_good_path(cluster)))
    yield StringCommand(
        *("rmdir", "--ignore-fail-on-non-empty", QuoteString(cluster.paths.config)),
        *("&&", "docker", "volume", "rm", "--force", commands.SHARED_TMP, ">/dev/null", "&&"),
        *("systemctl", "daemon-reload", "&&", "systemctl", "reset-failed"),
        *(observed.full_unit(unit) for unit in node.UNITS),
        *("2>/dev/null", "||", "true"),
    )
    observed.forget(host)


@operation(is_idempotent=False)
@guarded
def logged(units: list[str], lines: int) -> Commands:
    """Print the last lines of units.

    + units: names of units
    + lines: how many
    """
    selected = [part for unit in units for part in ("-u", QuoteString(f"{unit}.service"))]
    yield streamed(
        StringCommand("journalctl", "--no-pager", "-o", "short-iso", "-n", str(lines), *selected)
    )
