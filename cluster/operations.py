"""pyinfra operations: each brings one thing on a host to what cluster.yaml says, or says why not.

Every one compares first and does nothing where nothing differs, so that a second run is all
"No changes". Long waits run on the host, with a deadline, progress lines and a reason at the end.
"""

from __future__ import annotations

import difflib
import json

import click
from pyinfra import host, logger, state
from pyinfra.api import QuoteString, StringCommand, operation

from cluster import commands, node, observed
from cluster.fabric import fabric_problem
from cluster.facts import Completion, RayNodes, ReachesRay, program_command
from cluster.findings import Finding, judge
from cluster.host_state import Answer, HostState
from cluster.node import File
from cluster.programs import source
from cluster.settings import Cluster
from cluster.shell import (
    Commands,
    active,
    connector_arguments,
    guarded,
    print_table,
    refuse,
    streamed,
)
from cluster.status import HEADER, Status, host_status, lines
from cluster.tables import log_patterns, table

_QUIETLY = (">/dev/null", "2>&1", "||", "true")


MAX_TOKENS = 16
"""Of the completion at the end of a deploy."""


@operation()
@guarded
def locked(take_over: bool = False) -> Commands:
    """Hold the lock of the cluster on this host until this run ends; stop if somebody else has it.

    + take_over: take it from whoever has it
    """
    if state.is_executing:
        holder = observed.lock(host, take_over, connector_arguments())
        if holder is not None:
            yield refuse(
                f"another run works on this cluster: {holder.get('who', 'unknown')}, since "
                f"{holder.get('since', 'unknown')}, with: {holder.get('command', 'unknown')}",
                "Wait for it, or take the lock from it: --data take_over=true",
            )
            return
    host.noop("this run has the lock")


@operation()
@guarded
def probed(cluster: Cluster, unless_serving: bool = False) -> Commands:
    """Look at this host and meet the others over the fabric, all at the same time.

    + cluster: the cluster
    + unless_serving: not where vllm serve runs as wanted: the completion at the end proves more
    """
    if unless_serving and observed.serves(cluster):
        host.noop("vllm serve runs as wanted")
    elif state.is_executing:
        observed.probe(host)
        host.noop("probed")
    yield from ()


@operation()
@guarded
def judged(cluster: Cluster, as_json: bool = False) -> Commands:
    """Stop if preflight's rules find an error on any host of this run; show what they find.

    + cluster: the cluster
    + as_json: print the findings as JSON on stdout
    """
    if not state.is_executing:
        host.noop("judged at run time")
        return
    findings = judge(observed.situation(cluster))
    silenced = [each for each in findings if each.id in cluster.silence]
    counted = [each for each in findings if each.id not in cluster.silence]
    errors = sum(each.severity == "error" for each in counted)
    if as_json:
        click.echo(json.dumps([each.to_json() for each in counted]))
    else:
        _show_findings(cluster, counted, silenced)
    if errors:
        yield refuse(f"preflight: {errors} error{'s' if errors > 1 else ''}, see above")
        return
    host.noop(f"{len(counted)} warnings")


def _show_findings(cluster: Cluster, counted: list[Finding], silenced: list[Finding]) -> None:
    colours = {"error": "red", "warning": "yellow"}
    for name in cluster.nodes:
        own = [each for each in counted if each.host == name]
        if own:
            logger.info(f"    {click.style(name, bold=True)}")
        for each in own:
            label = click.style(each.severity.ljust(7), fg=colours[each.severity])
            logger.info(f"      {label} {each.id}: {each.found}")
            logger.info(f"              why: {each.why}")
            logger.info(f"              do:  {each.remedy}")
    for each in silenced:
        reason = cluster.silence[each.id]
        logger.info(f"    {each.host}: {each.id} is silenced ({reason}): {each.found}")


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
    + unless_serving: see probed
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
    + unless_serving: see probed
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
def answers(cluster: Cluster) -> Commands:
    """Stop unless a completion comes back; report it.

    + cluster: the cluster
    """
    if not state.is_executing:
        host.noop("asked at run time")
        return
    wanted = commands.completion(cluster, cluster.deadlines.completion, MAX_TOKENS)
    answer = host.get_fact(Completion, wanted=wanted, _stdin=source("completion"))
    if answer.error:
        yield refuse(_no_completion(cluster, answer), "See: pyinfra -y inventory.py tasks/logs.py")
        return
    _report(cluster, answer)
    host.noop("a completion came back")


def _no_completion(cluster: Cluster, answer: Answer) -> str:
    url = api_url(cluster)
    text = f"No completion from {url} after {answer.seconds} s: {answer.error}"
    if answer.error and answer.error.startswith("HTTP 5"):
        # It will be restarted, but not before the watchdog has seen it fail for a while.
        text += ". The server listens, but its engine is dead: pyinfra -y inventory.py "
        text += "tasks/restart.py"
    return text


@operation()
@guarded
def seen(report: bool = False) -> Commands:
    """Read what is on this host.

    + report: with what only a report shows
    """
    found = observed.look(host, report)
    host.noop(found.docker_error or "read")
    yield from ()


@operation()
@guarded
def status_shown(cluster: Cluster, as_json: bool = False) -> Commands:
    """Ask for a completion; print what every host should run and runs. Stop unless a token came.

    + cluster: the cluster
    + as_json: print all of it as JSON on stdout instead
    """
    if not state.is_executing:
        host.noop("shown at run time")
        return
    status = _status(cluster)
    if as_json:
        click.echo(json.dumps(status.to_json()))
    else:
        print_table(HEADER, [layer.row for each in status.hosts for layer in each.layers])
        for line in lines(status):
            logger.info(f"    {line}")
    if status.answer is None:
        yield refuse(f"{cluster.head} takes no part in this run, so nothing was asked")
    elif status.answer.error:
        yield refuse(_no_completion(cluster, status.answer))
    elif not as_json:
        _report(cluster, status.answer)
    host.noop("shown")


def _status(cluster: Cluster) -> Status:
    hosts = active()
    found = {name: observed.look(each, report=True) for name, each in hosts.items()}
    answer, head = None, found.get(cluster.head)
    if head is not None:
        wanted = commands.completion(cluster, cluster.deadlines.completion, MAX_TOKENS)
        wanted["metrics"] = True
        answer = host.get_fact(Completion, wanted=wanted, _stdin=source("completion"))
    return Status(
        cluster=cluster.name,
        url=api_url(cluster),
        model=cluster.served_model_name,
        hosts=[
            host_status(cluster, name, found[name], observed.wanted(hosts[name]))
            for name in cluster.nodes
            if name in found
        ],
        ray=head.report.ray if head and head.report else None,
        watchdog=_watchdog_status(cluster, found),
        answer=answer,
    )


def _watchdog_status(cluster: Cluster, found: dict[str, HostState]) -> str:
    said = _token_status(cluster, found[cluster.head]) if cluster.head in found else "not asked"
    blind = [
        name
        for name, state in found.items()
        if node.RANKS_TIMER in node.timers(cluster, name)
        and state.unit(node.RANKS_TIMER, "ActiveState") != "active"
    ]
    return said + (f"; nothing watches over the ranks on {', '.join(blind)}" if blind else "")


def _token_status(cluster: Cluster, head: HostState) -> str:
    if not cluster.watchdog.enabled:
        return "off, by cluster.yaml"
    if head.unit(node.WATCHDOG_TIMER, "ActiveState") != "active":
        return "not running"
    try:
        last = json.loads(head.watchdog)
    except ValueError:
        return "on, has not asked yet"
    restarts = len(last.get("restarts", []))
    return f"{last.get('verdict')}, {last.get('why')}; {restarts} restarts in the last hour"


def api_url(cluster: Cluster) -> str:
    """The URL of the API as this machine would reach it."""
    listen = cluster.serve.host
    name = cluster.ssh_of(cluster.head).address if listen == "0.0.0.0" else listen  # noqa: S104
    return f"http://{name}:{cluster.serve.port}/v1"


def _report(cluster: Cluster, answer: Answer) -> None:
    image = observed.image(host)
    ranks = f"{cluster.tensor_parallel_size} x {cluster.serve.pipeline_parallel_size}"
    rows = [
        ("model", cluster.served_model_name),
        ("hosts", ", ".join(f"{name} {cluster.address(name)}" for name in cluster.nodes)),
        ("ranks", f"tensor x pipeline = {ranks}, executor {cluster.executor}"),
        ("image", f"{cluster.image.name}: {image.versions}" if image else cluster.image.name),
        ("prompt", commands.PROMPT),
        ("answer", f"{answer.text!r} ({answer.tokens} tokens in {answer.seconds} s)"),
        ("URL", api_url(cluster)),
    ]
    if answer.metrics:
        rows.append(("load", _load(answer.metrics)))
    for label, text in rows:
        logger.info(f"    {click.style(label.ljust(7), bold=True)} {text}")


def _load(metrics: dict[str, float]) -> str:
    def count(name: str) -> str:
        return f"{metrics.get(name, 0):,.0f}"

    return (
        f"{count('num_requests_running')} requests running, "
        f"{count('num_requests_waiting')} waiting, "
        f"KV cache {metrics.get('kv_cache_usage_perc', 0):.0%} full, "
        f"{count('generation_tokens_total')} tokens generated since its start"
    )


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


def reporter(cluster: Cluster) -> str:
    """The host that speaks for the group: the head, or the first host where it takes no part."""
    names = active()
    return cluster.head if cluster.head in names else min(names)
