"""pyinfra operations of preflight: look at every host, judge what was found by its rules."""

from __future__ import annotations

import json

import click
from pyinfra import host, logger, state
from pyinfra.api import operation

from cluster import observed
from cluster.findings import Finding, judge
from cluster.settings import Cluster
from cluster.shell import Commands, guarded, refuse


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
