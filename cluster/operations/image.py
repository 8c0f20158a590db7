"""pyinfra operations that bring the image to every host, and see that it is the same one.

A host pulls it from its registry, or gets it from the head over the fabric. What a tag means is
asked once, on the head; everybody else goes by the digest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from pyinfra import host, state
from pyinfra.api import FunctionCommand, QuoteString, StringCommand, operation

from cluster import image as images
from cluster import observed
from cluster.facts import Reaches, RegistryAnswer, program_command
from cluster.image import Relay
from cluster.memory import remembered
from cluster.operations.model import copy_to_head
from cluster.programs import keyed, source
from cluster.settings import Cluster
from cluster.shell import (
    Commands,
    active,
    guarded,
    refuse,
    shared_ports,
    streamed,
    transfer_secrets,
)


@dataclass
class _Memory:
    """How one host gets the image in this run."""

    way: str = "here"
    """here, pull (from its registry) or relay (from the head)."""
    relay: Relay | None = None
    """On the head: what all share."""


_memory = partial(remembered, _Memory)


@operation()
@guarded
def planned(cluster: Cluster, always: bool = False) -> Commands:
    """Find out whether this host needs the image, and which way it can take.

    + cluster: the cluster
    + always: have it brought even where the name is there, for a tag that has moved
    """
    found = observed.look(host)
    if found.docker_error:
        yield refuse(
            f"Docker does not answer: {found.docker_error}",
            "Is it installed and running, and may this user use it (root or sudo)?",
        )
        return
    if found.image is not None and not always:
        host.noop(f"{cluster.image.name} is here: {found.image.id}")
        return
    ways = {"registry": "pull", "relay": "relay", "archive": "relay"}
    way = ways.get(cluster.image.source)
    if way is None and state.is_executing:
        address, port = images.registry_endpoint(cluster.image.name)
        way = "pull" if host.get_fact(Reaches, address=address, port=port) else "relay"
    _memory(host).way = way or "pull"
    host.noop(f"it will take the way: {way}")


@operation()
@guarded
def prepared(cluster: Cluster) -> Commands:
    """Have the head pull the image, or find out what it will give to the others.

    + cluster: the cluster
    """
    receivers = _receivers(cluster)
    memory = _memory(host)
    if not state.is_executing or not receivers:
        if memory.way != "here":
            yield _pull(cluster, cluster.image.name)
            observed.forget(host)
        return
    archive = cluster.image.archive
    if archive and not copy_to_head(cluster, archive, images.ARCHIVE):
        yield refuse(f"{archive} could not be copied to {host.name}")
        return
    wanted = _source(cluster)
    answer = host.get_fact(
        RegistryAnswer,
        wanted={"role": "resolve", "image": cluster.image.name, **wanted},
        _stdin=source("registry"),
        _ignore_errors=True,
    )
    if not answer or "error" in answer:
        yield refuse(f"{host.name} cannot give {cluster.image.name} to the others, see above")
        return
    needs_it = memory.way != "here"
    # One download for all: the head takes what it lacks through its own relay.
    memory.way = "relay"
    memory.relay = Relay(answer["digest"], wanted, receivers, needs_it, shared_ports("image"))


def _source(cluster: Cluster) -> dict[str, Any]:
    """Where the head takes the image from: what it has already, if it has it."""
    if cluster.image.archive:
        return {"archive": images.ARCHIVE}
    found = observed.look(host).image
    if found is None or _memory(host).way != "here":
        return {}
    digest = found.digest(cluster.image.name)
    if digest == found.id:
        return {"local": True}
    return {"image": f"{images.repository(cluster.image.name)}@{digest}"}


@operation()
@guarded
def pulled(cluster: Cluster) -> Commands:
    """Pull the image on this host, by the digest that the head has.

    + cluster: the cluster
    """
    if host.name == cluster.head or _memory(host).way != "pull":
        host.noop("nothing to pull here")
        return
    name = cluster.image.name
    head = active().get(cluster.head)
    found = observed.look(head).image if head and state.is_executing else None
    digest = found.digest(name) if found else None
    if digest is None or found is None or digest == found.id:
        yield _pull(cluster, name)
    else:
        pinned = f"{images.repository(name)}@{digest}"
        yield _pull(cluster, pinned)
        if pinned != name:
            yield StringCommand("docker", "tag", QuoteString(pinned), QuoteString(name))
    observed.forget(host)


def _pull(cluster: Cluster, name: str) -> FunctionCommand:
    deadline = ("timeout", str(cluster.deadlines.pull))
    return streamed(StringCommand(*deadline, "docker", "pull", QuoteString(name)))


@operation()
@guarded
def relayed(cluster: Cluster) -> Commands:
    """Bring the image from the head to the hosts that do not pull it, all at the same time.

    + cluster: the cluster
    """
    receivers = _receivers(cluster)
    takes_part = bool(receivers) and (host.name == cluster.head or host.name in receivers)
    if not state.is_executing or not takes_part:
        host.noop("nothing to relay here, or that is seen at run time")
        return
    head = active().get(cluster.head)
    relay = _memory(head).relay if head else None
    if relay is None:
        yield refuse(
            f"{cluster.head} takes no part in this run, and {host.name} gets the image from there",
            "pyinfra -y inventory.py tasks/image.py",
        )
        return
    wanted = relay.argument(cluster, host.name)
    yield streamed(
        program_command("registry", wanted),
        keyed(source("registry"), transfer_secrets(cluster.encrypt)),
    )
    if host.name == cluster.head and cluster.image.archive:
        yield StringCommand("rm", "-f", images.ARCHIVE)
    observed.forget(host)


@operation()
@guarded
def usable(cluster: Cluster) -> Commands:
    """Stop unless the image is here and has in it what the executor needs.

    + cluster: the cluster
    """
    if not state.is_executing:
        host.noop("looked at run time")
        return
    name, image = cluster.image.name, observed.image(host)
    if image is None:
        yield refuse(f"{name} is not here.")
    elif image.versions.vllm is None:
        yield refuse(f"{name} has no vLLM in it ({image.versions}).")
    elif cluster.executor == "ray" and image.versions.ray is None:
        yield refuse(
            f"{name} has no Ray in it ({image.versions}): stock vLLM images come without Ray "
            "since 0.18.",
            'Either build one: FROM that image, RUN pip install "ray==2.56.1", '
            "or set executor: mp in cluster.yaml.",
        )
    else:
        host.noop(str(image.versions))


@operation()
@guarded
def same_image(cluster: Cluster) -> Commands:
    """Stop unless all hosts of this run have the same image.

    + cluster: the cluster
    """
    if not state.is_executing:
        host.noop("compared at run time")
        return
    digests = observed.digests()
    if len(set(digests.values())) > 1:
        rows = [f"  {name}: {digest}" for name, digest in sorted(digests.items())]
        yield refuse(
            f"The hosts have different images under the name {cluster.image.name}:",
            *rows,
            "Ranks of different builds hang or disagree. Bring it to all hosts again: "
            "pyinfra inventory.py tasks/image.py --data pull=always",
        )
        return
    host.noop(f"{len(digests)} hosts have {next(iter(digests.values()), 'no image')}")


def _receivers(cluster: Cluster) -> tuple[str, ...]:
    hosts = active()
    return tuple(
        name for name in cluster.workers if name in hosts and _memory(hosts[name]).way == "relay"
    )
