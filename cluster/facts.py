"""Facts: what pyinfra reads from a host. Each is one round trip of one program of remote/."""

from __future__ import annotations

import json
from typing import Any

from pyinfra.api import FactBase, QuoteString, StringCommand
from pyinfra.api.exceptions import FactProcessError

from cluster.host_state import Answer, ContainerState, Failure, HostReport, HostState, ImageState
from cluster.node import Versions


def program_command(program: str, wanted: dict[str, Any]) -> StringCommand:
    """The command that runs a program of cluster/remote; its text has to come over stdin."""
    return StringCommand("python3", "-", program, QuoteString(json.dumps(wanted)))


def _object(output: list[str]) -> Any:
    try:
        return json.loads(output[-1])
    except ValueError:
        raise FactProcessError(f"expected JSON, got: {output[-1][:200]!r}") from None


class NodeState(FactBase[HostState]):
    """Image, containers, units and files of a host. Pass _stdin=source("node_state")."""

    def command(self, wanted: dict[str, Any]) -> StringCommand:
        """`wanted` is the argument of remote/node_state.py."""
        return program_command("node_state", wanted)

    def process(self, output: list[str]) -> HostState:
        """Turn the JSON into a HostState."""
        found = _object(output)
        try:
            image = found.pop("image")
            containers = found.pop("containers")
            report = found.pop("report", None)
            if report:
                failures = report.pop("failures")
                report["failures"] = {key: Failure(**value) for key, value in failures.items()}
            return HostState(
                report=HostReport(**report) if report else None,
                image=ImageState(**image) if image else None,
                containers={key: ContainerState(**value) for key, value in containers.items()},
                **found,
            )
        except (TypeError, AttributeError, KeyError) as error:
            raise FactProcessError(f"unexpected answer of node_state: {error}") from None


class KnownGood(FactBase[list[dict[str, Any]]]):
    """What a host keeps of deployments that are known to be good, the newest first.

    Pass _stdin=source("known_good").
    """

    def command(self, wanted: dict[str, Any]) -> StringCommand:
        """`wanted` is the argument of remote/known_good.py."""
        return program_command("list", wanted)

    def process(self, output: list[str]) -> list[dict[str, Any]]:
        """Return the records."""
        return list(_object(output)["archives"])


class StoredHere(FactBase[dict[str, Any]]):
    """Images and models that a host keeps, or what was deleted. Pass _stdin=source("stored")."""

    def command(self, role: str, wanted: dict[str, Any]) -> StringCommand:
        """`wanted` is the argument of remote/stored.py in its role list or delete."""
        return program_command(role, wanted)

    def process(self, output: list[str]) -> dict[str, Any]:
        """Return the answer."""
        return dict(_object(output))


class Reaches(FactBase[bool]):
    """Whether a host can open a TCP connection, within three seconds."""

    def command(self, address: str, port: int) -> StringCommand:
        """`address` is a name or an address."""
        script = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
        call = ("python3", "-c", QuoteString(script), QuoteString(address), str(port))
        return StringCommand(*call, "2>/dev/null", "&&", "echo", "yes", "||", "true")

    @staticmethod
    def default() -> bool:
        """Silence is no."""
        return False

    def process(self, output: list[str]) -> bool:
        """Read the word."""
        return "yes" in output


class RegistryAnswer(FactBase[dict[str, Any]]):
    """The result of remote/registry.py. Pass _stdin=source("registry")."""

    def command(self, wanted: dict[str, Any]) -> StringCommand:
        """`wanted` is its argument."""
        return program_command("registry", wanted)

    def process(self, output: list[str]) -> dict[str, Any]:
        """Return the last line."""
        return dict(_object(output))


class RelayCheck(FactBase[dict[str, Any]]):
    """Whether a directory holds what its manifest says: {state, digest, missing, different, ...}.

    Pass _stdin=source("relay").
    """

    def command(self, wanted: dict[str, Any]) -> StringCommand:
        """`wanted` is the argument of remote/relay.py."""
        return program_command("relay", wanted)

    def process(self, output: list[str]) -> dict[str, Any]:
        """Return the result."""
        return dict(_object(output))


class Unpacked(FactBase[str]):
    """Which archive a model was made of; "" for none. Pass _stdin=source("unpack")."""

    def command(self, record: str) -> StringCommand:
        """`record` is the file that says it."""
        return program_command("unpack", {"role": "state", "record": record})

    @staticmethod
    def default() -> str:
        """Silence is none."""
        return ""

    def process(self, output: list[str]) -> str:
        """Return its identity."""
        return str(_object(output)["archive"])


class UnifiedMemory(FactBase[bool]):
    """Whether the GPUs of a host share its memory: nvidia-smi knows no memory of theirs."""

    def command(self) -> StringCommand:
        """Ask nvidia-smi; a host without it has none."""
        query = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader")
        return StringCommand(*query, "2>/dev/null", "||", "true")

    @staticmethod
    def default() -> bool:
        """No GPU, no unified memory."""
        return False

    def process(self, output: list[str]) -> bool:
        """[N/A] instead of MiB, as on a DGX Spark."""
        return any("N/A" in line for line in output)


class ImageVersions(FactBase[Versions]):
    """Versions of Python, vllm, ray and torch inside an image, without importing them."""

    def command(self, image: str) -> StringCommand:
        """Run Python in a container of `image` that has no network."""
        return StringCommand(
            *("docker", "run", "--rm", "--network=none", "--entrypoint=python3"),
            *(QuoteString(image), "-c", QuoteString(_VERSIONS)),
        )

    def process(self, output: list[str]) -> Versions:
        """Turn the JSON into Versions."""
        found = _object(output)
        try:
            return Versions(**found)
        except TypeError as error:
            raise FactProcessError(f"unexpected versions: {error}") from None


_VERSIONS = """
import importlib.metadata, json, platform
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
print(json.dumps(dict({n: version(n) for n in ("vllm", "ray", "torch")},
                      python=platform.python_version())))
""".strip()


class ReachesRay(FactBase[str]):
    """Why this host cannot reach Ray's head; "" when it can. Pass _stdin=source("reach")."""

    def command(self, wanted: dict[str, Any]) -> StringCommand:
        """`wanted` is the argument of remote/reach.py."""
        return StringCommand(program_command("reach", wanted), "2>&1", "||", "true")

    @staticmethod
    def default() -> str:
        """Silence is success."""
        return ""


class RayNodes(FactBase[str]):
    """What Ray lacks of the expected nodes right now; "" when it lists all of them.

    Pass _stdin=source("ray_nodes").
    """

    def command(self, arguments: list[str]) -> StringCommand:
        """`arguments` is commands.ray_nodes()."""
        return StringCommand(*map(QuoteString, arguments), "2>&1", "||", "true")

    @staticmethod
    def default() -> str:
        """Silence is success."""
        return ""

    def process(self, output: list[str]) -> str:
        """Drop the line that says that all is well."""
        return "\n".join(line for line in output if not line.startswith("Ray lists "))


class Completion(FactBase[Answer]):
    """A short completion from the API on the head. Pass _stdin=source("completion")."""

    def command(self, wanted: dict[str, Any]) -> StringCommand:
        """`wanted` is the argument of remote/completion.py."""
        return program_command("completion", wanted)

    def process(self, output: list[str]) -> Answer:
        """Turn the JSON into an Answer."""
        found = _object(output)
        try:
            return Answer(**found)
        except TypeError as error:
            raise FactProcessError(f"unexpected answer of completion: {error}") from None


class HostProbe(FactBase[dict[str, Any]]):
    """Everything that preflight and discover judge. Pass _stdin=source("probe").

    Raises nothing: what cannot be read comes back as {"garbage": why}.
    """

    def command(self, wanted: dict[str, Any], as_root: bool = False) -> StringCommand:
        """`wanted` is the argument of remote/probe.py.

        as_root: use sudo if it asks for no password, and say so if it does.
        """
        program = program_command("probe", wanted)
        if not as_root:
            return program
        refusal = json.dumps({"garbage": "this ssh user may not use sudo without a password"})
        return StringCommand(
            *("if", "sudo", "-n", "true", "2>/dev/null;", "then", "sudo", "-n", program),
            *(";", "else", "echo", QuoteString(refusal), ";", "fi"),
        )

    def process(self, output: list[str]) -> dict[str, Any]:
        """Parse the JSON; a host that prints something else is a finding, not an end."""
        try:
            found = json.loads(output[-1])
        except ValueError:
            return {"garbage": f"the probe printed no JSON: {output[-1][:120]!r}"}
        return found if isinstance(found, dict) else {"garbage": "the probe printed no object"}


class LayerProof(FactBase[dict[str, Any]]):
    """What a rank says of every network layer. Pass _stdin=source("prove").

    All ranks have to run this at the same time. Raises nothing: see HostProbe.
    """

    def command(self, arguments: list[str]) -> StringCommand:
        """`arguments` is proof.command()."""
        return StringCommand(*map(QuoteString, arguments))

    def process(self, output: list[str]) -> dict[str, Any]:
        """Parse the last line, which is JSON."""
        try:
            found = json.loads(output[-1])
        except ValueError:
            return {"garbage": f"it printed no JSON: {output[-1][:120]!r}"}
        return found if isinstance(found, dict) else {"garbage": "it printed no object"}
