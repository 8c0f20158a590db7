"""pyinfra operations that keep what is known to be good on the hosts, and go back to it.

A deployment is known to be good once it has ended in a completion. Every host keeps the files of
the last two such deployments; the image stays in Docker.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from pyinfra import host, inventory, logger, state
from pyinfra.api import Host, QuoteString, StringCommand, operation

from cluster import commands, node, observed
from cluster.facts import KnownGood
from cluster.node import Image
from cluster.observed import Restored, UnreadableError
from cluster.programs import source
from cluster.settings import Cluster
from cluster.shell import Commands, guarded, refuse

KEPT = 2


def failure_arguments(cluster: Cluster) -> dict[str, Any]:
    """Data for the tasks of a deploy that touch what runs.

    With on_failure: rollback a failure skips the rest of them instead of ending the run.
    """
    if cluster.on_failure != "rollback":
        return {}
    return {"_ignore_errors": True, "_if": nothing_failed}


def nothing_failed() -> bool:
    """Whether no operation of this run has failed so far."""
    return not something_failed()


def something_failed() -> bool:
    """Whether an operation of this run has failed and the run went on."""
    return any(
        state.get_results_for_host(each).ignored_error_ops
        for each in state.inventory.get_active_hosts()
    )


def kept_images(each: Host) -> frozenset[str]:
    """Docker's ids of the images that a rollback would need on a host. Raises UnreadableError."""
    return frozenset(str(record["image"]) for record in _records(each))


@operation()
@guarded
def kept(cluster: Cluster) -> Commands:
    """Keep the files of this deployment as known to be good; a completion has come back.

    + cluster: the cluster
    """
    found, image = observed.look(host), observed.image(host)
    if image is None:
        host.noop("there is no image here")
        return
    target = observed.restored(host)
    own = _identity_of(target.name) if target else identity(cluster, _shared(host, image))
    if found.known_good[:1] and _identity_of(found.known_good[0]) == own:
        host.noop(f"{own} is kept already")
        return
    now = time.gmtime()
    wanted = {
        **_place(cluster),
        "name": f"{time.strftime('%Y%m%dT%H%M%SZ', now)}-{own}.tar",
        "keep": KEPT,
        "record": {
            "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", now),
            "cluster": cluster.to_json(),
            "image": image.id,
            "definitions": observed.wanted(host).definitions,
        },
    }
    yield _program("keep", wanted)
    observed.forget(host)


@dataclass(frozen=True)
class Choice:
    """What a rollback goes back to, or why it cannot."""

    target: Restored | None
    why: str = ""


def choose(to: str | None, after_failure: bool) -> Choice:
    """Choose for the current host what a rollback goes back to.

    to: the id of a deployment; default: the newest that is not what cluster.yaml says.
    after_failure: the newest, since this very run has not been kept.

    The head decides, so that all hosts go back to the same deployment.
    """
    cluster: Cluster = host.data.cluster
    try:
        head: Host = inventory.get_host(cluster.head)
        image = observed.image(head)
        names = [str(record["name"]) for record in _records(head)]
        own = "" if after_failure or image is None else identity(cluster, _shared(head, image))
        ids = [_identity_of(name) for name in names]
        wanted = next((each for each in ids if (each == to if to else each != own)), None)
        if wanted is None:
            return Choice(None, f"{head.name} keeps no {'such' if to else 'other'} deployment")
        for record in _records(host):
            if _identity_of(record["name"]) == wanted:
                return Choice(_restored(record))
        return Choice(None, f"{host.name} does not keep the deployment {wanted}")
    except UnreadableError as error:
        return Choice(None, str(error))


def task_data(choice: Choice, after_failure: bool) -> dict[str, Any]:
    """Data for the tasks of a rollback: the cluster of that time."""
    data: dict[str, Any] = {}
    if choice.target:
        data["cluster"] = choice.target.cluster
    if after_failure:
        data["_if"] = something_failed
    return data


def _records(each: Host) -> list[dict[str, Any]]:
    found = each.get_fact(
        KnownGood,
        wanted=_place(each.data.cluster),
        _stdin=source("known_good"),
        _ignore_errors=True,
    )
    if found is None:
        raise UnreadableError(f"{each.name} does not say what it keeps; see the lines above")
    return list(found)


def _restored(record: dict[str, Any]) -> Restored:
    try:
        return Restored(
            name=record["name"],
            since=record["since"],
            cluster=_cluster_of(record["cluster"]),
            image=record["image"],
            definitions=record["definitions"],
        )
    except (KeyError, ValidationError):
        raise UnreadableError(
            f"{host.name}: what is kept in {record.get('name')} is of another version of this "
            "project; check that version out and deploy it instead"
        ) from None


def _cluster_of(values: dict[str, Any]) -> Cluster:
    return Cluster.model_validate(values)


@operation()
@guarded
def restored(choice: Choice, after_failure: bool = False) -> Commands:
    """Stop vllm serve where its group changes, and put the files of a deployment back.

    + choice: what to go back to
    + after_failure: not where that is what has just failed
    """
    cluster: Cluster = host.data.cluster
    if choice.target is None:
        yield refuse(f"nothing to go back to: {choice.why}")
        return
    target = choice.target
    if not state.is_executing:
        host.noop(f"back to {target.name}")
        return
    image = observed.image(host)
    own = identity(cluster, _shared(host, image)) if after_failure and image else ""
    if own == _identity_of(target.name):
        yield refuse("nothing to go back to: what failed is the last that served")
        return
    strangers = set(target.cluster.hosts) ^ set(cluster.hosts)
    if strangers:
        yield refuse(
            f"{target.name} was deployed on other hosts: {', '.join(sorted(strangers))}",
            "Put the hosts section of that time into cluster.yaml, and deploy.",
        )
        return
    observed.restore(host, target)
    if observed.look(host).image is None:
        yield refuse(
            f"{host.name}: the image of {target.name} is gone: {target.image}",
            f"Pull it again ({target.cluster.image.name}), and run this again.",
        )
        return
    logger.info(f"{host.print_prefix}back to the deployment of {target.since}")
    if not observed.runs(host, commands.SERVE):
        service = f"{commands.SERVE}.service"
        yield StringCommand("systemctl", "stop", service, "2>/dev/null", "||", "true")
    units = {node.unit_path(unit): observed.full_unit(unit) for unit in node.UNITS}
    yield _program("restore", {**_place(cluster), "name": target.name, "units": units})
    observed.forget(host)


@operation()
@guarded
def given_up(choice: Choice) -> Commands:
    """End a deploy that has failed and has been rolled back: it stays a failure.

    + choice: what the hosts have gone back to
    """
    since = choice.target.since if choice.target else "nothing"
    yield refuse(
        f"this deploy failed, see above; the hosts are back at the deployment of {since}",
        "cluster.yaml still says what failed; the next deploy will try that again.",
    )


def _shared(each: Host, image: Image) -> Image:
    """A host's image under an id that equal images have on all hosts, in either image store."""
    found = observed.look(each).image
    return replace(image, id=found.content) if found and found.content else image


_identities: dict[tuple[str, Image], str] = {}
"""By cluster (as JSON: pyinfra copies the object at every access) and image."""


def identity(cluster: Cluster, image: Image) -> str:
    """What tells one deployment from another: every file on every host."""
    key = (cluster.model_dump_json(), image)
    if key not in _identities:
        files = [
            (name, file.path, file.sha256)
            for name in cluster.nodes
            for file in node.render(cluster, name, image).files
        ]
        digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        _identities[key] = digest[:12]
    return _identities[key]


def _identity_of(name: str) -> str:
    """The id in an archive's name: TIME-ID.tar."""
    return name.rpartition("-")[2].removesuffix(".tar")


def _place(cluster: Cluster) -> dict[str, Any]:
    return {
        "folder": commands.known_good_path(cluster),
        "paths": [*node.paths(cluster), commands.secrets_path(cluster)],
    }


def _program(role: str, wanted: dict[str, Any]) -> StringCommand:
    argument = QuoteString(json.dumps(wanted))
    return StringCommand("python3", "-", role, argument, _stdin=source("known_good"))
