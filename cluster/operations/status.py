"""pyinfra operations that read what runs, ask for a completion, and report."""

from __future__ import annotations

import json

import click
from pyinfra import host, logger, state
from pyinfra.api import operation

from cluster import commands, node, observed
from cluster.facts import Completion
from cluster.host_state import Answer, HostState
from cluster.programs import source
from cluster.settings import Cluster
from cluster.shell import Commands, active, guarded, print_table, refuse
from cluster.status import HEADER, Status, host_status, lines

MAX_TOKENS = 16
"""Of the completion at the end of a deploy."""


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
