"""pyinfra operations that prove every network layer before a weight is loaded."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache, partial

import click
from pydantic import ValidationError
from pyinfra import host, logger, state
from pyinfra.api import operation

from cluster import commands, observed
from cluster.facts import LayerProof
from cluster.memory import remembered
from cluster.programs import source
from cluster.proof import AGAIN, BAD, Cause, Report, Verdict, argument, command, judge, layers
from cluster.settings import Cluster
from cluster.shell import Commands, active, guarded, print_table, refuse

FACT_SECONDS = 180
"""remote/prove.py ends by itself before that."""
COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "hangs": "red"}
COLUMNS_OF_HOSTS = 3


@dataclass
class _Memory:
    """What a host found, or why it could not look; None where nothing was to be proven."""

    found: Report | Cause | None = None


_memory = partial(remembered, _Memory)


@operation()
@guarded
def proven(cluster: Cluster, unless_serving: bool = False) -> Commands:
    """Go through the layers together with all other hosts of this run.

    + cluster: the cluster
    + unless_serving: not where vllm serve is up as wanted, or on its way up
    """
    if not state.is_executing:
        host.noop("proven at run time")
    # Not while it loads either: it measures the memory of its GPU then.
    elif unless_serving and observed.serves(cluster, ready=False):
        host.noop("vllm serve runs: its completion proves the layers")
    elif len(_ranks(cluster)) < 2:
        host.noop("one host in this run: no network between ranks")
    else:
        found = _memory(host).found = _prove(cluster)
        host.noop("went through the layers" if isinstance(found, Report) else found[0])
    yield from ()


def _prove(cluster: Cluster) -> Report | Cause:
    ranks = _ranks(cluster)
    here = observed.look(host)
    if cluster.executor == "ray":
        container = here.containers.get(commands.RAY)
        if container is None or container.status != "running":
            return f"{commands.RAY} does not run here", f"start Ray: {AGAIN}"
    elif here.image is None:
        return (
            f"{cluster.image.name} is not here",
            "pull it: pyinfra -y inventory.py tasks/image.py tasks/environment.py",
        )
    wanted = argument(cluster, ranks, host.name, _port())
    image = here.image.id if here.image else ""
    answer = host.get_fact(
        LayerProof,
        arguments=command(cluster, host.name, image, wanted),
        _stdin=source("prove"),
        _ignore_errors=True,
        _timeout=FACT_SECONDS,
    )
    if not answer or "garbage" in answer:
        why = (answer or {}).get("garbage", "the program did not run, see its error above")
        return why, f"is the image whole on {host.name}? pyinfra -y inventory.py tasks/status.py"
    try:
        return Report.model_validate(answer)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"its answer is not usable: {place}: {first['msg']}", "report this as a bug"


@operation()
@guarded
def layers_judged(cluster: Cluster, as_json: bool = False) -> Commands:
    """Show what the layers do on every host of this run; stop unless all are well.

    + cluster: the cluster
    + as_json: print the verdicts as JSON on stdout instead
    """
    found = {each.name: _memory(each).found for each in active().values()}
    if not state.is_executing or not any(found.values()):
        host.noop("judged at run time, or nothing was to be proven")
        return
    reports = {name: each for name, each in found.items() if isinstance(each, Report)}
    absent = {name: each for name, each in found.items() if isinstance(each, tuple)}
    verdicts = judge(cluster, _ranks(cluster), reports, absent)
    if as_json:
        click.echo(json.dumps([each.to_json() for each in verdicts]))
    else:
        _show(cluster, verdicts)
    bad = [each for each in verdicts if each.state in BAD]
    first = dict.fromkeys(each.layer for each in bad if each.state != "not tried")
    if bad:
        yield refuse(f"prove: {', '.join(first) or 'not all layers could be tried'}: see above")
        return
    host.noop("every layer goes over the fabric")


def _show(cluster: Cluster, verdicts: list[Verdict]) -> None:
    ranks = _ranks(cluster)
    by_place = {(each.layer, each.host): each for each in verdicts}
    if len(ranks) <= COLUMNS_OF_HOSTS:
        rows = [
            (layer, *(_cell(by_place[layer, name]) for name in ranks)) for layer in layers(cluster)
        ]
        print_table(("layer", *ranks), rows)
    else:
        print_table(
            ("layer", "on", "result"),
            [(each.layer, each.host, _cell(each)) for each in verdicts],
        )
    for each in verdicts:
        if each.state in {"ok", "skipped", "not tried"}:
            continue
        label = click.style(f"{each.layer} on {each.host}", bold=True)
        logger.info(f"    {label} {click.style(each.state, fg=COLOURS[each.state])}: {each.found}")
        for line in each.evidence:
            logger.info(f"      | {line}")
        logger.info(f"      do: {each.remedy}")


def _cell(verdict: Verdict) -> str:
    colour = COLOURS.get(verdict.state, "dim")
    return verdict.cell.replace(verdict.state, f"[{colour}]{verdict.state}[/]", 1)


def _ranks(cluster: Cluster) -> list[str]:
    hosts = active()
    return [name for name in cluster.nodes if name in hosts]


@cache
def _port() -> int:
    """For the store on the head; the same on all hosts of a run.

    Below what the kernel gives away (32768) and above what Ray takes (10002 to 19999).
    """
    return random.randrange(20000, 32768)  # noqa: S311 -- no secret
