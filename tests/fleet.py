"""The hosts of a cluster file played by pyinfra's @fake connector; also a pyinfra inventory.

A fake host remembers what the deployment did to it (image, files, containers), so that a second
run can find the first one's work, as on a real host.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import click
import pyinfra
from pyinfra.connectors.util import CommandOutput, OutputLine

from cluster import commands
from cluster.load import load
from cluster.node import unit_path
from cluster.settings import Cluster
from cluster.units import UNIT_DIRECTORY

DIGEST = "sha256:" + "1" * 64
VERSIONS = {"python": "3.12.9", "vllm": "0.17.1", "ray": "2.48.0", "torch": "2.9.0"}


@dataclass
class FakeHost:
    """One host: what is on it, and every command that it got."""

    image: dict[str, Any] | None = None
    versions: dict[str, str | None] = field(default_factory=lambda: dict(VERSIONS))
    files: dict[str, str] = field(default_factory=dict)
    running: dict[str, str] = field(default_factory=dict)
    """Running containers: name -> definition label."""
    timers: set[str] = field(default_factory=set)
    starts: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Part of a command -> what it prints on stderr when it fails."""
    addresses: dict[str, list[str]] = field(default_factory=dict)
    prefixed: dict[str, list[str]] = field(default_factory=dict)
    hcas: list[dict[str, Any]] = field(default_factory=list)
    probe_changes: dict[str, Any] = field(default_factory=dict)
    proof_changes: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    """What the model's directory holds: the digest of its manifest."""
    listed: str | None = None
    """The digest in the manifest that is kept here."""
    relays: list[list[str]] = field(default_factory=list)
    """Receivers of every transfer that this host has sent."""
    reaches_registry: bool = True
    image_roles: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of remote/registry.py."""
    tags: list[str] = field(default_factory=list)
    deletions: list[str] = field(default_factory=list)
    """Images that were deleted."""
    kept: list[dict[str, Any]] = field(default_factory=list)
    """Deployments known to be good, the newest first: {record, files}."""
    untold: bool = False
    """A unit file has changed and systemd has not been told."""
    completion: dict[str, Any] = field(
        default_factory=lambda: {"text": "Hello.", "tokens": 2, "seconds": 0.1}
    )

    def state(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Answer like remote/node_state.py."""
        return {
            "docker_error": None,
            "systemd_error": None,
            "image": self.image,
            "containers": {
                name: {
                    "id": "c0",
                    "image": "i0",
                    "status": "running",
                    "definition": definition,
                }
                for name, definition in self.running.items()
            },
            "units": {name: self.unit(name) for name in wanted["units"]},
            "files": {path: self.files.get(path) for path in wanted["files"]},
            "secret_files": dict.fromkeys(wanted["secret_files"]),
            "addresses": self.addresses,
            "listening": commands.SERVE in self.running,
            "known_good": [row["record"]["name"] for row in self.kept],
        }

    def probe(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Answer like remote/probe.py on a host where all is well."""
        return {
            "hostname": "h",
            "infiniband_devices": True,
            "interfaces": [
                {"name": name, "kind": "physical", "mtu": 9000, "carrier": True, "addresses": owned}
                for name, owned in self.prefixed.items()
            ],
            "hcas": self.hcas,
            "gpus": [
                {"index": index, "name": "GPU", "driver": "580.1", "memory_bytes": 80 * 10**9}
                for index in range(8)
            ],
            "docker": {"error": None, "root": "/var/lib/docker", "runtimes": ["nvidia", "runc"]},
            "model": {"path": "/m", "exists": True, "free_bytes": 10**12},
            "meeting": {"failures": [], "frames": dict.fromkeys(wanted["meet"]["peers"], True)},
            "time": 0,
            **self.probe_changes,
        }

    def proof(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Answer like remote/prove.py on a host where every layer goes over the fabric."""
        interface, (address,) = next(row for row in self.addresses.items() if row[0] != "lo")
        layers = ["ray", "c10d", "gloo", "queue"] if wanted["gcs"] else ["c10d", "gloo", "queue"]
        results: dict[str, Any] = {
            layer: {"state": "ok", "seconds": 0.1, "addresses": [address]} for layer in layers
        }
        hcas = " ".join(f"[{n}]{hca['name']}:{hca['port']}/RoCE" for n, hca in enumerate(self.hcas))
        results["nccl"] = {
            "state": "ok",
            "addresses": [address],
            "busbw_gb_s": 22.5,
            "nccl_lines": [
                f"NCCL INFO Bootstrap: Using {interface}:{address}<0>",
                f"NCCL INFO NET/IB : Using {hcas} [RO]; OOB {interface}:{address}<0>",
                "NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/"
                + ("IB/0" if hcas else "Socket/0"),
            ],
        }
        return {
            "rank": wanted["rank"],
            "hostname": "h",
            "addresses": self.addresses,
            "environment": {},
            "seconds": 1,
            "layers": results,
            **self.proof_changes,
        }

    def registry(self, wanted: dict[str, Any]) -> Iterable[str]:
        """Answer like remote/registry.py."""
        self.image_roles.append(wanted)
        if wanted["role"] == "resolve":
            yield json.dumps({"digest": DIGEST, "bytes": 1, "seconds": 0.1})
        elif wanted["role"] == "receive" or wanted["tag"]:
            self.image = {"id": "sha256:" + "0" * 64, "digests": []}

    def relay(self, wanted: dict[str, Any]) -> Iterable[str]:
        """Answer like remote/relay.py."""
        if wanted["role"] == "check":
            state = "ok" if self.model and self.model == self.listed else "none"
            if self.model and wanted.get("digest") not in (None, self.model):
                state = "stale"
            yield json.dumps({"state": state, "digest": self.listed})
        elif wanted["role"] == "manifest":
            self.model = self.listed = self.model or "on the disk"
        elif wanted["role"] == "send":
            self.relays.append([each["name"] for each in wanted["receivers"]])
        elif wanted["role"] == "receive":
            self.model = self.listed = wanted["digest"]

    def stored(self, wanted: dict[str, Any]) -> Iterable[str]:
        """Answer like remote/stored.py: one image in use, and an old one."""
        if "entries" in wanted:
            self.deletions += [entry["id"] for entry in wanted["entries"]]
            rows = [{"kind": "image", "name": "old", "freed": 5} for _ in wanted["entries"]]
            yield json.dumps({"deleted": rows, "refused": [], "freed": 5 * len(rows)})
            return
        images = [
            {"id": name, "references": [f"{wanted['repositories'][0]}:{name}"], "bytes": 5}
            for name in ("new", "old", "kept")
        ]
        images[0]["used_by"], images[1]["used_by"], images[2]["used_by"] = ["vllm-ray"], [], []
        yield json.dumps({"images": images})

    def keep(self, wanted: dict[str, Any]) -> None:
        """Do what remote/known_good.py does."""
        record = {**wanted["record"], "name": wanted["name"]}
        own = wanted["name"].rpartition("-")[2]
        others = [row for row in self.kept if not row["record"]["name"].endswith(own)]
        self.kept = [{"record": record, "files": dict(self.files)}, *others][: wanted["keep"]]

    def unit(self, name: str) -> dict[str, str]:
        """Answer like systemctl show."""
        if unit_path(name) not in self.files:
            return {"Id": f"{name}.service", "LoadState": "not-found", "ActiveState": "inactive"}
        is_active = name in self.running or name in self.timers
        return {
            "LoadState": "loaded",
            "ActiveState": "active" if is_active else "inactive",
            "UnitFileState": "enabled" if is_active else "disabled",
            "NeedDaemonReload": "yes" if self.untold else "no",
        }

    def answer(self, command: str, stdin: str | None) -> Iterable[str]:
        """Do what a command asks; return its output."""
        if command.startswith("python3 - node_state"):
            yield json.dumps(self.state(json.loads(shlex.split(command)[3])))
        elif "python3 - probe" in command:
            words = shlex.split(command)
            yield json.dumps(self.probe(json.loads(words[words.index("probe") + 1])))
        elif "python3 - prove" in command or " - prove " in command:
            yield json.dumps(self.proof(json.loads(shlex.split(command)[-1])))
        elif command.startswith("python3 - registry"):
            yield from self.registry(json.loads(shlex.split(command)[3]))
        elif command.startswith("python3 -c") and "create_connection" in command:
            yield from ["yes"] if self.reaches_registry else []
        elif command.startswith("docker tag"):
            self.tags.append(command)
        elif command.startswith("python3 - relay"):
            yield from self.relay(json.loads(shlex.split(command)[3]))
        elif command.startswith("docker run") and "--name=vllm-hub" in command:
            self.model = "new"
        elif command.startswith("nvidia-smi --query-gpu=memory.total"):
            yield "[N/A]"
        elif command.startswith("python3 - keep"):
            self.keep(json.loads(shlex.split(command)[3]))
        elif (
            command.startswith(("python3 - list", "python3 - delete")) and "repositories" in command
        ):
            yield from self.stored(json.loads(shlex.split(command)[3]))
        elif command.startswith("python3 - list"):
            yield json.dumps({"archives": [row["record"] for row in self.kept]})
        elif command.startswith("python3 - restore"):
            name = json.loads(shlex.split(command)[3])["name"]
            row = next(row for row in self.kept if row["record"]["name"] == name)
            self.files = dict(row["files"])
            yield json.dumps({"changed": []})
        elif command.startswith("python3 - completion"):
            yield json.dumps(self.completion)
        elif "importlib.metadata" in command:
            yield json.dumps(self.versions)
        elif " docker pull " in command:
            self.image = {"id": "sha256:" + "0" * 64, "digests": [f"vllm/vllm-openai@{DIGEST}"]}
        elif stdin and (target := re.search(r"mv (\S+)\.new (\S+)$", command)):
            self.files[target[2]] = stdin
            self.untold = self.untold or target[2].startswith(UNIT_DIRECTORY)
        elif command == "systemctl daemon-reload":
            self.untold = False
        elif start := re.search(r"systemctl start --no-block (\S+)\.service", command):
            assert not self.untold
            self.starts.append(start[1])
            label = f"{commands.DEFINITION_LABEL}=([0-9a-f]+)"
            found = re.search(label, self.files[unit_path(start[1])])
            assert found
            self.running[start[1]] = found[1]
        elif timer := re.search(r"systemctl enable --quiet --now (\S+\.timer)", command):
            self.timers.add(timer[1])
        elif timer := re.search(r"systemctl disable --quiet --now (\S+\.timer)", command):
            self.timers.discard(timer[1])
        elif stop := re.search(r"systemctl (?:stop|disable --quiet --now) (\S+)\.service", command):
            self.running.pop(stop[1], None)
        elif command.startswith("rm -f "):
            for path in shlex.split(command)[2:]:
                self.files.pop(path, None)


class Fleet:
    """All fake hosts of a test, by name."""

    def __init__(self) -> None:
        self.hosts: dict[str, FakeHost] = {}
        self.history: list[tuple[str, str]] = []
        self.inputs: list[tuple[str, str]] = []
        """What each command got over stdin."""
        self.failing = ""
        """vllm serve does not start where its unit has this in it."""

    def __getitem__(self, name: str) -> FakeHost:
        return self.hosts.setdefault(name, FakeHost())

    def run(self, name: str, command: Any, arguments: dict[str, Any]) -> tuple[bool, CommandOutput]:
        """Play @fake's run_shell_command."""
        host = self[name.removeprefix("@fake/")]
        if not host.addresses:  # as cluster.yaml says
            fabric = pyinfra.inventory.get_host(name).data.cluster.hosts[name].fabric
            host.addresses = {"lo": ["127.0.0.1"], fabric.interface: [str(fabric.address.ip)]}
            host.prefixed = {fabric.interface: [str(fabric.address)]}
            host.hcas = [
                {
                    "name": hca.partition(":")[0],
                    "port": int(hca.partition(":")[2] or 1),
                    "state": "ACTIVE",
                    "interfaces": [fabric.interface],
                }
                for hca in fabric.hcas or []
            ]
        text = command.get_masked_value()
        host.commands.append(text)
        self.history.append((name.removeprefix("@fake/"), text))
        self.inputs.append((name.removeprefix("@fake/"), arguments.get("_stdin") or ""))
        complaint = next((line for part, line in host.failures.items() if part in text), None)
        unit = host.files.get(unit_path(commands.SERVE), "")
        if self.failing and self.failing in unit and "wait_unit" in text and commands.SERVE in text:
            complaint = "vllm serve: error: unrecognized arguments"
        if complaint is None:
            answer = host.answer(text, arguments.get("_stdin"))
            lines = [OutputLine("stdout", line) for line in answer]
        else:
            lines = [OutputLine("stderr", complaint)]
        if arguments.get("print_output"):
            for line in lines:
                click.echo(line.line, err=True)
        return complaint is None, CommandOutput(lines)


def fake(cluster: Cluster) -> Cluster:
    """The same cluster under the names that @fake gives its hosts."""
    hosts = {f"@fake/{name}": host for name, host in cluster.hosts.items()}
    return cluster.model_copy(update={"hosts": hosts})


if __name__ == "builtins":  # executed by pyinfra as an inventory
    _cluster = fake(load())
    _data = {"cluster": _cluster, "_sudo": True, "fake_delay": 0, "fake_delay_jitter": 0}
    head = [(_cluster.head, _data)]
    workers = [(name, _data) for name in _cluster.workers]
