"""Judges the reports that a run brought back with the deployment's own rules."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.proof import Cause, Report, Verdict, judge

from . import cases
from .cases import Case

NO_REPORT: Cause = ("no report", "see the logs of the run")


def verdicts(case: Case, reports: Path) -> dict[tuple[str, str], Verdict]:
    """{(layer, host): verdict} of a case."""
    cluster = cases.cluster(case)
    found, absent = {}, {}
    for name in cluster.nodes:
        text = (reports / f"{case.name}-{name}.json").read_text(encoding="utf-8")
        if "layers" in text:
            found[name] = Report.model_validate(json.loads(text))
        else:
            absent[name] = NO_REPORT
    said = judge(cluster, cluster.nodes, found, absent)
    return {(each.layer, each.host): each for each in said}


def judged(reports: Path) -> str:
    """All cases of a folder, for a person."""
    lines = []
    for case in (*cases.PROVE, *cases.PROVE_RAY):
        if not list(reports.glob(f"{case.name}-spark-[0-9].json")):
            continue
        lines.append(f"== {case.name}")
        for each in verdicts(case, reports).values():
            lines.append(f"  {each.layer} on {each.host} ({each.seconds} s): {each.cell}")
            if each.state not in {"ok", "skipped"}:
                lines += [f"      {each.found}", *(f"      | {line}" for line in each.evidence)]
                lines.append(f"      do: {each.remedy}")
    return "\n".join(lines)
