"""The commands of a node as argument lists: docker run, ray start, vllm serve. Pure.

The Ray container and the serve container are siblings on the head. They share three things, and
without any one of them the group hangs or dies: the process table (Ray finds its raylet there),
/dev/shm (tensors), and /tmp (unix sockets of vLLM's local queues).
"""

from __future__ import annotations

import json
from typing import Any, Literal

from cluster.environment import CONTAINER_CACHE
from cluster.settings import Cluster, flag_arguments

PROMPT = "Say hello in one short sentence."
RAY = "vllm-ray"
"""Name of the container and of the unit that run Ray."""
SERVE = "vllm-serve"
"""Name of the container and of the unit that run vllm serve."""
SHARED_TMP = "vllm-tmp"
"""The Docker volume that is /tmp in both containers."""
WATCHDOG = "vllm-watchdog"
"""Name of the timer and its service on the head."""
WATCHDOG_STATE = f"/run/{WATCHDOG}/state.json"
"""What the watchdog remembers and last found; gone after a reboot."""
RANKS = "vllm-ranks"
"""Name of the timer and its service that watch over a group with executor mp, on every host."""
RANKS_STATE = f"/run/{RANKS}/state.json"
"""What the head's has seen of the ranks; gone after a reboot."""
CALLS_FROM = (512, 1023)
"""Ports from which a rank that waits calls its head: the kernel gives them to none that does not
ask for them, so that they tell it from a rank that runs. Only root may ask."""
CLUSTER_LABEL = "multinode-vllm.cluster"
DEFINITION_LABEL = "multinode-vllm.definition"


def node_env_path(cluster: Cluster) -> str:
    """The env file on a host, without secrets."""
    return f"{cluster.paths.config}/node.env"


def secrets_path(cluster: Cluster) -> str:
    """The env file on a host that holds the secrets."""
    return f"{cluster.paths.config}/secrets.env"


def carry_over_path(cluster: Cluster) -> str:
    """The list of variables that vLLM must not copy from the head to the workers."""
    return f"{cluster.paths.config}/ray_non_carry_over_env_vars.json"


def known_good_path(cluster: Cluster) -> str:
    """The directory on a host with the files of deployments that are known to be good."""
    return f"{cluster.paths.config}/known-good"


def ray_container(cluster: Cluster, name: str, image: str) -> list[str]:
    """docker run for Ray on node `name`. `image` is an image id."""
    host = cluster.hosts[name]
    is_head = host.role == "head"
    start = ["start", "--block"]
    if is_head:
        start += ["--head", f"--port={cluster.ray.port}", "--include-dashboard=false"]
    else:
        start += [f"--address={cluster.gcs_address}"]
    start += [
        f"--node-ip-address={host.fabric.address.ip}",
        f"--num-gpus={host.gpus}",
        f"--object-store-memory={cluster.ray.object_store_memory}",
        *flag_arguments(cluster.ray.flags),
    ]
    return [
        *docker_run(cluster, name, RAY),
        "--ipc=shareable",
        f"--shm-size={cluster.container.shm_size}",
        f"--volume={SHARED_TMP}:/tmp",
        "--entrypoint=ray",
        *cluster.container.flags,
        image,
        *start,
    ]


def serve_container(cluster: Cluster, name: str, image: str, drains: bool = False) -> list[str]:
    """docker run for vllm serve on node `name`: the head, or with executor mp every node.

    drains: this vLLM knows how to let running requests finish when it is stopped.
    """
    run = docker_run(cluster, name, SERVE)
    if cluster.executor == "ray":
        path = carry_over_path(cluster)
        run += [
            f"--ipc=container:{RAY}",
            f"--pid=container:{RAY}",
            f"--volume={SHARED_TMP}:/tmp",
            f"--volume={path}:/root/.config/vllm/ray_non_carry_over_env_vars.json:ro",
        ]
    else:
        run += [f"--shm-size={cluster.container.shm_size}"]
    serve = _serve(cluster, name)
    if drains and name == cluster.head and cluster.deadlines.drain:
        serve.append(f"--shutdown-timeout={cluster.deadlines.drain}")
    return [*run, "--entrypoint=vllm", *cluster.container.flags, image, *serve]


def program_path(cluster: Cluster, program: str) -> str:
    """A program of remote/ on a host."""
    return f"{cluster.paths.config}/{program}.py"


def _program(
    cluster: Cluster, program: str, wanted: dict[str, Any], role: str | None = None
) -> list[str]:
    return ["python3", program_path(cluster, program), role or program, json.dumps(wanted)]


def reach_at_boot(cluster: Cluster, name: str) -> list[str]:
    """What a worker's unit waits with until the head's Ray can be reached."""
    wanted = {**reach(cluster, name), "deadline": cluster.deadlines.boot, "tell": True}
    return _program(cluster, "reach", wanted)


def reach(cluster: Cluster, name: str) -> dict[str, Any]:
    """The argument of remote/reach.py on node `name`."""
    return {
        "address": str(cluster.head_address),
        "port": cluster.ray.port,
        "deadline": cluster.deadlines.reach,
        "source": str(cluster.address(name)),
    }


def completion(cluster: Cluster, deadline: int, max_tokens: int) -> dict[str, Any]:
    """The argument of remote/completion.py on the head."""
    return {
        "host": _api_host(cluster),
        "port": cluster.serve.port,
        "model": cluster.served_model_name,
        "deadline": deadline,
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "secrets": secrets_path(cluster),
    }


def drain(cluster: Cluster, refuses: bool, role: Literal["drain", "open"] = "drain") -> list[str]:
    """What stops vllm serve on the head, or makes up for a stop that was killed.

    refuses: this vLLM knows --shutdown-timeout
    """
    wanted = {
        "container": SERVE,
        "host": _api_host(cluster),
        "port": cluster.serve.port,
        "refuses": refuses,
        "drain": cluster.deadlines.drain,
        "stop": cluster.deadlines.stop,
    }
    return _program(cluster, "drain", wanted, role)


def back_off(cluster: Cluster, unit: str) -> list[str]:
    """What lets a unit wait before it restarts a container that has ended soon after its start."""
    wanted = {
        "unit": f"{unit}.service",
        "state": f"/run/{unit}/back-off.json",
        "delay": cluster.restarts.delay,
        "max_delay": cluster.restarts.max_delay,
        "reset_after": cluster.restarts.reset_after,
    }
    return _program(cluster, "back_off", wanted)


def _api_host(cluster: Cluster) -> str:
    listen = cluster.serve.host
    return "127.0.0.1" if listen == "0.0.0.0" else listen  # noqa: S104


def watchdog(cluster: Cluster) -> list[str]:
    """What the watchdog's service runs."""
    settings = cluster.watchdog
    wanted = {
        "completion": completion(cluster, settings.deadline, 1),
        "unit": f"{SERVE}.service",
        "container": SERVE,
        "group_unit": f"{RAY if cluster.executor == 'ray' else SERVE}.service",
        "state": WATCHDOG_STATE,
        "failures": settings.failures,
        "minimum_uptime": settings.minimum_uptime,
        "cool_down": settings.cool_down,
        "restarts_per_hour": settings.restarts_per_hour,
    }
    return _program(cluster, "watchdog", wanted)


def gather(cluster: Cluster, name: str) -> list[str]:
    """What the unit of node `name` brings the ranks together with before each start."""
    wanted: dict[str, Any] = {**_meeting(cluster), "deadline": cluster.deadlines.boot}
    if name == cluster.head:
        return _program(cluster, "gather", wanted | {"workers": _workers(cluster)}, "head")
    wanted |= {"source": str(cluster.address(name)), "calls_from": CALLS_FROM}
    return _program(cluster, "gather", wanted, "worker")


def watch_ranks(cluster: Cluster, name: str) -> list[str]:
    """What looks on node `name` whether the group that its rank belongs to still stands."""
    wanted: dict[str, Any] = {
        **_meeting(cluster),
        "unit": f"{SERVE}.service",
        "container": SERVE,
    }
    if name == cluster.head:
        own = {"workers": _workers(cluster), "calls_from": CALLS_FROM, "state": RANKS_STATE}
        return _program(cluster, "gather", wanted | own, "watch-head")
    wanted |= {"source": str(cluster.address(name))}
    return _program(cluster, "gather", wanted, "watch-worker")


def _meeting(cluster: Cluster) -> dict[str, Any]:
    return {"port": cluster.serve.rendezvous_port, "head": str(cluster.head_address)}


def _workers(cluster: Cluster) -> dict[str, str]:
    return {str(cluster.address(worker)): worker for worker in cluster.workers}


def ray_nodes(cluster: Cluster, deadline: int) -> list[str]:
    """docker exec that waits, `deadline` seconds at most, until Ray lists every node.

    The program, remote/ray_nodes.py, comes over stdin.
    """
    expected = [
        f"{name}={cluster.address(name)}={cluster.hosts[name].gpus}" for name in cluster.nodes
    ]
    return [
        *("docker", "exec", "-i", RAY, "python3", "-"),
        *(f"--address={cluster.gcs_address}", f"--deadline={deadline}", *expected),
    ]


def ray_nodes_at_boot(cluster: Cluster) -> list[str]:
    """The same for a unit, which takes the program from its file."""
    return _ray_nodes_from_file(cluster, cluster.deadlines.boot)


def ray_nodes_now(cluster: Cluster) -> list[str]:
    """The same without a wait."""
    return _ray_nodes_from_file(cluster, 0)


def _ray_nodes_from_file(cluster: Cluster, deadline: int) -> list[str]:
    program, *arguments = ray_nodes(cluster, deadline)
    script = f'exec {program} "$@" < "$0"'
    return ["sh", "-c", script, program_path(cluster, "ray_nodes"), *arguments]


def _serve(cluster: Cluster, name: str) -> list[str]:
    serve = cluster.serve
    arguments = [
        "serve",
        cluster.model.name,
        f"--tensor-parallel-size={cluster.tensor_parallel_size}",
    ]
    if cluster.model.revision:
        arguments.append(f"--revision={cluster.model.revision}")
    if serve.pipeline_parallel_size > 1:
        arguments.append(f"--pipeline-parallel-size={serve.pipeline_parallel_size}")
    if cluster.executor == "ray":
        arguments.append("--distributed-executor-backend=ray")
    elif len(cluster.hosts) > 1:
        rank = cluster.nodes.index(name)
        arguments += [
            f"--nnodes={len(cluster.hosts)}",
            f"--node-rank={rank}",
            f"--master-addr={cluster.head_address}",
            f"--master-port={serve.rendezvous_port}",
        ]
        if rank:
            arguments.append("--headless")
    arguments += [
        f"--host={serve.host}",
        f"--port={serve.port}",
        f"--served-model-name={cluster.served_model_name}",
    ]
    if serve.max_model_len is not None:
        arguments.append(f"--max-model-len={serve.max_model_len}")
    if serve.gpu_memory_utilization is not None:
        arguments.append(f"--gpu-memory-utilization={serve.gpu_memory_utilization}")
    return arguments + flag_arguments(serve.flags)


def docker_run(cluster: Cluster, name: str, container: str) -> list[str]:
    """The arguments that every container of ours on node `name` begins with."""
    settings, has_hcas = cluster.container, bool(cluster.hosts[name].fabric.hcas)
    arguments = [
        *("docker", "run", "--rm", f"--name={container}", "--network=host"),
        *("--log-driver=local", "--log-opt=max-size=50m"),
        f"--label={CLUSTER_LABEL}={cluster.name}",
        f"--env-file={node_env_path(cluster)}",
    ]
    if cluster.container_secrets:
        arguments.append(f"--env-file={secrets_path(cluster)}")
    if settings.gpus:
        arguments.append(f"--gpus={settings.gpus}")
    if settings.privileged:
        arguments.append("--privileged")
    if has_hcas:
        arguments += ["--device=/dev/infiniband", "--cap-add=IPC_LOCK"]
    arguments += [f"--device={device}" for device in settings.devices]
    arguments += [f"--ulimit={key}={value}" for key, value in settings.ulimits.items()]
    arguments.append(f"--volume={cluster.paths.cache}:{CONTAINER_CACHE}")
    if cluster.paths.huggingface:
        arguments.append(f"--volume={cluster.paths.huggingface}:{CONTAINER_CACHE}/huggingface")
    if cluster.model_is_directory:
        arguments.append(f"--volume={cluster.model.name}:{cluster.model.name}:ro")
    return arguments
