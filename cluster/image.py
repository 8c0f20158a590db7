"""Names of the image, and the arguments that bring it to the hosts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.settings import Cluster

ARCHIVE = "/var/tmp/vllm-image.archive"  # noqa: S108 -- root's own, and read as root
"""Where image.archive lies on the head until the image is everywhere."""
DEFAULT_REGISTRY = "registry-1.docker.io"
"""Where Docker pulls names without a registry from."""


def repository(name: str) -> str:
    """A reference without its tag and digest."""
    name = name.partition("@")[0]
    return name.rpartition(":")[0] if ":" in name.rpartition("/")[2] else name


def local_name(name: str) -> str:
    """The name that an image gets on a host that did not pull it from its registry.

    Docker gives a digest of a repository to nobody but who pulled from there.
    """
    digest = name.partition("@sha256:")[2]
    return f"{repository(name)}:sha256-{digest[:16]}" if digest else name


def names(name: str) -> list[str]:
    """The names under which the image may be on a host."""
    return list(dict.fromkeys([name, local_name(name)]))


def registry_endpoint(name: str) -> tuple[str, int]:
    """(host, port) of the registry that a reference is pulled from."""
    first, slash, _ = name.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        return DEFAULT_REGISTRY, 443
    host, _, port = first.partition(":")
    return host, int(port) if port else 443


@dataclass(frozen=True)
class Relay:
    """What all hosts of one relay of the image share."""

    digest: str
    source: dict[str, Any]
    """Where the head takes it from: {} (the registry), {"local": True} or {"archive": path}."""
    receivers: tuple[str, ...]
    head_needs_it: bool
    ports: tuple[int, ...]

    def argument(self, cluster: Cluster, name: str) -> dict[str, Any]:
        """The argument of remote/registry.py on host `name`: it serves, or receives."""
        shared = {
            "image": cluster.image.name,
            "digest": self.digest,
            "address": str(cluster.head_address),
            "ports": list(self.ports),
            "result": False,
        }
        tag = local_name(cluster.image.name)
        if name == cluster.head:
            receivers = [
                {"name": each, "address": str(cluster.address(each))} for each in self.receivers
            ]
            own = {"receivers": receivers, "tag": tag if self.head_needs_it else None}
            return {"role": "serve", **shared, **self.source, **own}
        return {
            "role": "receive",
            **shared,
            "tag": tag,
            "name": name,
            "index": self.receivers.index(name),
            "source": str(cluster.address(name)),
            "sender": cluster.head,
        }
