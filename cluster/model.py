"""Where the model is on the hosts, and what brings it there, as arguments of programs. Pure.

The head has it first: from the hub, from the machine that deploys, or since ever. The others get it
from the head over the fabric, by remote/relay.py, and compare themselves with its manifest.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from cluster.environment import CONTAINER_CACHE
from cluster.remote import hub
from cluster.settings import Cluster

HUB = "vllm-hub"
"""Name of the container that downloads."""


@dataclass(frozen=True)
class Place:
    """The directory of the model on every host, and the file beside it that lists its content."""

    root: str
    manifest: str
    exclude: tuple[str, ...] = (".arriving",)

    @property
    def arriving(self) -> str:
        """Where an archive lies on the head until it is unpacked."""
        return f"{self.root}/.arriving/archive"

    @property
    def record(self) -> str:
        """The file on the head that says which archive was unpacked last."""
        return f"{self.manifest.removesuffix('.json')}.archive"


def hub_cache(cluster: Cluster) -> str:
    """The directory on the hosts that huggingface_hub calls its cache: models--* are in it."""
    home = cluster.paths.huggingface or f"{cluster.paths.cache}/huggingface"
    return f"{home}/hub"


def place(cluster: Cluster) -> Place:
    """Where the model of a cluster is."""
    model = cluster.model
    if cluster.model_is_directory:
        root = model.name.rstrip("/")
        return Place(root, f"{cluster.paths.cache}/relay/{_plain(root)}.json")
    folder = f"models--{model.name.replace('/', '--')}"
    revision = _plain(model.revision or "main")
    return Place(
        f"{hub_cache(cluster)}/{folder}",
        f"{cluster.paths.cache}/relay/{folder}@{revision}.json",
        # What only the hub's own client needs, and beginnings of downloads.
        exclude=("*.incomplete", "*.lock", "trees/*"),
    )


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def download(cluster: Cluster, image: str) -> list[str]:
    """docker run that downloads the model on the head.

    Standard input: a line with the token or an empty one, then remote/hub.py.
    """
    wanted = {
        "repository": cluster.model.name,
        "revision": cluster.model.revision,
        "cache": f"{CONTAINER_CACHE}/huggingface/hub",
        "result": False,
    }
    arguments = [
        *("docker", "run", "--rm", "-i", f"--name={HUB}", "--network=host"),
        f"--volume={cluster.paths.cache}:{CONTAINER_CACHE}",
    ]
    if cluster.paths.huggingface:
        arguments.append(f"--volume={cluster.paths.huggingface}:{CONTAINER_CACHE}/huggingface")
    arguments += [
        f"--env={key}={cluster.env[key]}" for key in HUB_VARIABLES if cluster.env.get(key)
    ]
    program = ["-c", hub.START, "hub", json.dumps(wanted)]
    return [*arguments, "--entrypoint=python3", image, *program]


HUB_VARIABLES = (
    *("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy"),
    *("no_proxy", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"),
)
"""Variables of cluster.yaml's env that a download needs; it gets no others."""


@dataclass(frozen=True)
class Transfer:
    """What all hosts of one transfer share."""

    place: Place
    digest: str
    """Tells the content that the head's manifest lists."""
    receivers: tuple[str, ...]
    ports: tuple[int, ...]

    def argument(self, cluster: Cluster, name: str, drop_cache: bool) -> dict[str, Any]:
        """The argument of remote/relay.py on host `name`: it sends, or receives."""
        shared = {
            "root": self.place.root,
            "manifest": self.place.manifest,
            "ports": list(self.ports),
            "address": str(cluster.head_address),
            "drop_cache": drop_cache,
            "result": False,
            "digest": self.digest,
        }
        if name == cluster.head:
            receivers = [
                {"name": each, "address": str(cluster.address(each))} for each in self.receivers
            ]
            return {"role": "send", **shared, "receivers": receivers}
        return {
            "role": "receive",
            **shared,
            "name": name,
            "index": self.receivers.index(name),
            "source": str(cluster.address(name)),
            "sender": cluster.head,
            "delete": cluster.model.delete,
        }
