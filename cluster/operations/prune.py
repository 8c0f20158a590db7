"""pyinfra operations that show old images and models, and delete what a person has named."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel
from pyinfra import host, logger, state
from pyinfra.api import Host, operation

from cluster import model, observed, stored
from cluster.facts import StoredHere
from cluster.image import repository
from cluster.memory import remembered
from cluster.operations.rollback import kept_images
from cluster.programs import source
from cluster.settings import Cluster
from cluster.shell import Commands, active, guarded, print_table, refuse
from cluster.stored import Choice, Current, Deleted, Entry, Stored

AnswerType = TypeVar("AnswerType", bound=BaseModel)


@dataclass
class _Memory:
    """What a host keeps, and what could not be read of it."""

    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


_memory = partial(remembered, _Memory)


@operation()
@guarded
def listed(cluster: Cluster) -> Commands:
    """Read what this host keeps.

    + cluster: the cluster
    """
    if state.is_executing:
        answer = _ask(Stored, "list", _argument(cluster))
        current = Current(
            image=cluster.image.name,
            image_ids=kept_images(host),
            model=cluster.model.name,
            revision=cluster.model.revision or "main",
        )
        memory = _memory(host)
        memory.entries = stored.entries({host.name: answer}, current)
        memory.problems = stored.problems({host.name: answer})
    host.noop("read")
    yield from ()


@operation()
@guarded
def chosen(confirmation: str | None) -> Commands:
    """Show what the hosts keep, and what of it would be deleted.

    + confirmation: NAME[,NAME] or unused; None: nothing is deleted
    """
    if not state.is_executing:
        host.noop("shown at run time")
        return
    found = _entries()
    print_table(stored.HEADER, stored.table_rows(found, time.time()))
    for each in _hosts():
        for problem in _memory(each).problems:
            logger.info(f"    {problem}")
    if confirmation is None:
        unused = sum(entry.bytes for entry in found if not entry.in_use)
        logger.info(f"    not in use: {stored.size_text(unused)}")
        logger.info("    Delete: --data delete=NAME[,NAME] or --data delete=unused")
    else:
        problems = stored.chosen(found, confirmation).problems
        if problems:
            yield refuse(*problems)
            return
    host.noop("shown")


@operation(is_idempotent=False)
@guarded
def deleted(cluster: Cluster, confirmation: str) -> Commands:
    """Delete on this host what was confirmed, and nothing that is in use meanwhile.

    + cluster: the cluster
    + confirmation: see chosen
    """
    if not state.is_executing:
        host.noop("at run time")
        return
    choice: Choice = stored.chosen(_entries(), confirmation)
    wanted = choice.arguments(host.name)
    if not wanted:
        host.noop("nothing of it is here")
        return
    answer = _ask(Deleted, "delete", {**_argument(cluster), "entries": wanted})
    lines, is_done = stored.delete_summary({host.name: answer})
    for line in lines:
        logger.info(f"    {line}")
    if not is_done:
        yield refuse(f"{host.name} keeps some of it, see above")


def _ask(answer_type: type[AnswerType], role: str, wanted: dict[str, Any]) -> AnswerType:
    answer = host.get_fact(
        StoredHere, role=role, wanted=wanted, _stdin=source("stored"), _ignore_errors=True
    )
    if answer is None:
        raise observed.UnreadableError(f"{host.name} did not answer; see the lines above")
    return answer_type.model_validate(answer)


def _argument(cluster: Cluster) -> dict[str, Any]:
    place = model.place(cluster)
    return stored.list_argument(
        repositories=[repository(cluster.image.name)],
        caches=[model.hub_cache(cluster)],
        directories=[place.root] if cluster.model_is_directory else [],
        transfers=[place.root],
    )


def _entries() -> list[Entry]:
    return [entry for each in _hosts() for entry in _memory(each).entries]


def _hosts() -> list[Host]:
    found = active().values()
    return sorted(found, key=lambda each: each.data.cluster.nodes.index(each.name))
