"""pyinfra operations that bring the model to every host, and prove that all of it is there.

Each run compares sizes, on all hosts at the same time, against the manifest that the head made.
Content is hashed when it travels, and when a person asks for it.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pyinfra import host, inventory, logger, state
from pyinfra.api import FunctionCommand, Host, QuoteString, State, StringCommand, operation

from cluster import model, observed
from cluster.facts import RelayCheck, UnifiedMemory, Unpacked, program_command
from cluster.inventory import SSH_CONFIG
from cluster.memory import remembered
from cluster.model import Transfer
from cluster.programs import keyed, source
from cluster.settings import HUB_TOKEN, Cluster, read_secret
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
    """What this run knows of the model on one host."""

    found: dict[str, Any] = field(default_factory=dict)
    """The result of relay.py's check."""


_memory = partial(remembered, _Memory)


def _found(each: Host) -> dict[str, Any]:
    return _memory(each).found


@operation()
@guarded
def downloaded(cluster: Cluster, update: bool = False, verify: bool = False) -> Commands:
    """Have the model on the head, and a manifest of it.

    + cluster: the cluster
    + update: ask the hub again what its revision means
    + verify: read and hash everything
    """
    place = model.place(cluster)
    if not state.is_executing:
        host.noop("checked at run time")
        return
    found = _check(place, verify)
    has_all = found["state"] == "ok"
    if cluster.model_source == "hub" and (update or not has_all):
        image = observed.image(host)
        if image is None:
            yield refuse(
                f"the model is downloaded with the image, and {cluster.image.name} is not here",
                "pyinfra -y inventory.py tasks/image.py tasks/model.py",
            )
            return
        command = StringCommand(*map(QuoteString, model.download(cluster, image.id)))
        yield streamed(command, f"{_token(cluster)}\n{source('hub')}")
        yield _manifest(place)
    elif cluster.model_source == "rsync":
        yield FunctionCommand(_rsync, (cluster, place.root), {})
        yield _manifest(place)
    elif cluster.model.archive and (not has_all or _unpacked(place) != _identity(cluster)):
        yield FunctionCommand(_archive, (cluster, place.arriving), {})
        wanted = {
            **{"role": "unpack", "archive": place.arriving, "root": place.root, "result": False},
            **{"record": place.record, "identity": _identity(cluster)},
        }
        yield streamed(program_command("unpack", wanted), source("unpack"))
        yield _manifest(place)
    elif not has_all or found.get("touched"):
        # A sender gives only what is as its manifest says, times included.
        yield _manifest(place)
    else:
        host.noop(f"{place.root} is as its manifest says")
        _memory(host).found = found
        return
    yield FunctionCommand(_checked_again, (place,), {})


def _checked_again(state: State, host: Host, place: model.Place) -> bool:  # noqa: ARG001
    _memory(host).found = _check(place)
    return True


def _check(place: model.Place, verify: bool = False, digest: str | None = None) -> dict[str, Any]:
    wanted = {
        **{"role": "check", "root": place.root, "manifest": place.manifest},
        **{"verify": verify, "digest": digest},
    }
    found = host.get_fact(RelayCheck, wanted=wanted, _stdin=source("relay"), _ignore_errors=True)
    if not found or "error" in found:
        why = (found or {}).get("error", "it did not say; see the lines above")
        raise observed.UnreadableError(f"{host.name}: {place.root} cannot be checked: {why}")
    return dict(found)


def _manifest(place: model.Place) -> Any:
    wanted = {
        **{"role": "manifest", "root": place.root, "manifest": place.manifest},
        **{"exclude": list(place.exclude), "result": False},
    }
    return streamed(program_command("relay", wanted), source("relay"))


def _token(cluster: Cluster) -> str:
    """The hub's token; it goes to the head's standard input and no further."""
    secret = cluster.secrets.get(HUB_TOKEN)
    return read_secret(secret).get_secret_value() if secret else ""


def _rsync(state: State, host: Host, cluster: Cluster, root: str) -> bool:  # noqa: ARG001
    local = str(Path(str(cluster.model.local)).expanduser()).rstrip("/")
    return copy_to_head(cluster, f"{local}/", f"{root}/")


def _unpacked(place: model.Place) -> str:
    return str(host.get_fact(Unpacked, record=place.record, _stdin=source("unpack")))


def _identity(cluster: Cluster) -> str:
    """What tells one archive from another."""
    path = Path(str(cluster.model.archive)).expanduser()
    info = path.stat()
    return f"{path.name} {info.st_size} {info.st_mtime_ns}"


def _archive(state: State, host: Host, cluster: Cluster, path: str) -> bool:  # noqa: ARG001
    return copy_to_head(cluster, str(cluster.model.archive), path)


def copy_to_head(cluster: Cluster, local: str, path: str) -> bool:
    """Copy a file or the content of a directory from this machine to the head.

    By rsync over the ssh that people use, so that an interrupted copy goes on. Return whether all
    of it is there; says why not.
    """
    argv = ["rsync", "-a", "--partial", "--info=progress2", "--mkpath", "-e"]
    argv += [f"ssh -F {SSH_CONFIG}", str(Path(local).expanduser()), f"{cluster.head}:{path}"]
    if local.endswith("/"):
        argv[-2] += "/"
    if cluster.ssh_of(cluster.head).user != "root":
        argv.insert(1, "--rsync-path=sudo -n rsync")
    try:
        return subprocess.run(argv, check=False).returncode == 0
    except FileNotFoundError:
        logger.error("    there is no rsync on this machine; install it here and on the head")
        return False


@operation()
@guarded
def compared(cluster: Cluster, verify: bool = False) -> Commands:
    """Compare the model on this host with the head's.

    + cluster: the cluster
    + verify: read and hash everything
    """
    if state.is_executing and host.name != cluster.head:
        digest = _digest(cluster)
        if digest is not None:
            _memory(host).found = _check(model.place(cluster), verify, digest)
    host.noop("compared")
    yield from ()


@operation()
@guarded
def relayed(cluster: Cluster) -> Commands:
    """Bring the model from the head to the hosts that lack some of it, all at the same time.

    + cluster: the cluster
    """
    receivers = _receivers(cluster)
    is_part = bool(receivers) and (host.name == cluster.head or host.name in receivers)
    if not state.is_executing or not is_part:
        host.noop("the model is here, or that is seen at run time")
        return
    digest = _digest(cluster)
    if digest is None:
        yield refuse(
            f"{cluster.head} takes no part in this run, and {host.name} lacks some of the model",
            "pyinfra -y inventory.py tasks/model.py",
        )
        return
    transfer = Transfer(model.place(cluster), digest, receivers, shared_ports("model"))
    is_unified = bool(host.get_fact(UnifiedMemory))
    wanted = transfer.argument(cluster, host.name, drop_cache=is_unified)
    yield streamed(
        program_command("relay", wanted), keyed(source("relay"), transfer_secrets(cluster.encrypt))
    )


@operation()
@guarded
def complete(cluster: Cluster) -> Commands:
    """Stop unless the model on this host is the head's; drop its pages where they are in the way.

    + cluster: the cluster
    """
    digest = _digest(cluster)
    if not state.is_executing or digest is None or host.name == cluster.head:
        host.noop("checked at run time, or nothing to compare with")
        return
    place = model.place(cluster)
    if _found(host).get("state") != "ok":
        _memory(host).found = _check(place, digest=digest)
    found = _found(host)
    if found["state"] != "ok":
        yield refuse(f"{host.name}: {place.root} is not the head's: {_difference(found)}")
        return
    host.noop(f"{place.root} is the head's")


@operation()
@guarded
def cache_dropped(cluster: Cluster) -> Commands:
    """Drop the model's pages before it is loaded, where the GPU shares the memory.

    A full page cache counts as used there, and stops loads at 73 to 97 %.

    + cluster: the cluster
    """
    if not state.is_executing or observed.serves(cluster, ready=False):
        host.noop("nothing is to be loaded")
    elif host.get_fact(UnifiedMemory):
        wanted = {"role": "drop", "root": model.place(cluster).root, "result": False}
        yield streamed(program_command("relay", wanted), source("relay"))
    else:
        host.noop("the GPUs have memory of their own")


def _difference(found: dict[str, Any]) -> str:
    parts = []
    for kind in ("missing", "different"):
        names = (found.get(kind) or {}).get("names") or []
        count = (found.get(kind) or {}).get("count", 0)
        if count:
            more = f" and {count - 3} more" if count > 3 else ""
            parts.append(f"{kind}: {', '.join(names[:3])}{more}")
    return "; ".join(parts) or f"it is {found['state']}"


def _digest(cluster: Cluster) -> str | None:
    """What identifies the head's model; None where the head takes no part in this run."""
    head: Host = inventory.get_host(cluster.head)
    if head.name not in active():
        return None
    return _found(head).get("digest")


def _receivers(cluster: Cluster) -> tuple[str, ...]:
    hosts = active()
    return tuple(
        name
        for name in cluster.workers
        if name in hosts and _found(hosts[name]).get("state", "ok") != "ok"
    )
