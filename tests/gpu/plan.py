"""What the runner has to run, rendered from cluster.yaml by the deployment's own code, as JSON.

The env files, the `docker run` lines and the arguments of the programs in remote/ are what a deploy
would put on hosts. Nothing here is written a second time, except which case needs what.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from cluster import commands, node
from cluster.proof import argument, command
from cluster.settings import Cluster
from cluster.tables import log_patterns, table

from . import cases
from .cases import Case
from .pack import PACKAGES, PYTHON, versions

PACKED = versions(PACKAGES.read_text(encoding="utf-8"))
TORCH = "2.11.0"
"""What that vLLM requires; the GPU machine has it."""
IMAGE = node.Image(
    "image-of-tests-gpu", node.Versions(PYTHON, PACKED["vllm"], PACKED["ray"], TORCH)
)
FIRST_PORT = 20000
COMPLETION_TOKENS = 16
RAY_SECONDS = 45
LOST_RAY_SECONDS = 12
"""Until Ray lists the nodes, where it never will."""
PROGRAMS = ("reach", "ray_nodes", "prove", "completion")


def plan() -> dict[str, Any]:
    """All cases, rendered."""
    remote = files("cluster.remote")
    return {
        "image": IMAGE.id,
        "programs": {
            name: remote.joinpath(f"{name}.py").read_text(encoding="utf-8") for name in PROGRAMS
        },
        "progress": {**table("phases")["serve"], **log_patterns()},
        "prove": [case.name for case in cases.PROVE],
        "prove-ray": [case.name for case in cases.PROVE_RAY],
        "cases": {
            case.name: _case(case, FIRST_PORT + index) for index, case in enumerate(cases.ALL)
        },
    }


def _case(case: Case, port: int) -> dict[str, Any]:
    cluster = cases.cluster(case)
    ray_seconds = LOST_RAY_SECONDS if case.flags_lost else RAY_SECONDS
    ray_nodes = _last(commands.ray_nodes(cluster, ray_seconds), "-")
    return {
        "executor": cluster.executor,
        "is_routed": case.is_routed,
        "model": cluster.served_model_name,
        "port": cluster.serve.port,
        "completion": commands.completion(cluster, 60, COMPLETION_TOKENS),
        "ray_nodes": ray_nodes if _has_ray(cluster) else None,
        "nodes": {name: _node(case, cluster, name, port) for name in cluster.nodes},
    }


def _node(case: Case, cluster: Cluster, name: str, port: int) -> dict[str, Any]:
    wanted = argument(cluster, cluster.nodes, name, port)
    runs: dict[str, list[str]] = {}
    if _has_ray(cluster):
        run = commands.ray_container(cluster, name, IMAGE.id)
        runs["ray"] = [word for word in run if word.partition("=")[0] not in case.flags_lost]
    if commands.SERVE in node.containers(cluster, name):
        runs["serve"] = commands.serve_container(cluster, name, IMAGE.id)
    fabric = cluster.hosts[name].fabric
    return {
        "interface": fabric.interface,
        "address": str(fabric.address),
        # Only text that a deploy would write; there are no secrets here.
        "files": {
            file.path: file.content
            for file in node.render(cluster, name, IMAGE).files
            if file.path.startswith(f"{cluster.paths.config}/") and not file.path.endswith(".py")
        },
        "runs": runs,
        "reach": commands.reach(cluster, name),
        "prove": _last(command(cluster, name, IMAGE.id, wanted), "-"),
    }


def _has_ray(cluster: Cluster) -> bool:
    return cluster.executor == "ray"


def _last(argv: list[str], first: str) -> list[str]:
    """The arguments of Python: from its program, which comes over stdin, to the end."""
    return argv[argv.index(first) :]
