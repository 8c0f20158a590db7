"""systemd units as text. They start the containers at boot, in order, and start them again.

Restart=always, never on-failure: after the death of its engine vllm serve exits with code 0.
"""

from __future__ import annotations

import re

from cluster import commands
from cluster.settings import Cluster

UNIT_DIRECTORY = "/etc/systemd/system"
WATCH_RANKS_SECONDS = 5
"""Between two looks at the ranks of a group: one that has lost a rank stands still until then."""
_PLAIN = re.compile(r"[A-Za-z0-9@_+=:,./-]+")


def quote(argument: str) -> str:
    """Quote one argument of an Exec line (systemd.syntax(7), systemd.service(5), COMMAND LINES)."""
    escaped = argument.replace("%", "%%").replace("$", "$$")
    if _PLAIN.fullmatch(escaped):
        return escaped
    escaped = escaped.replace("\\", "\\\\").replace('"', '\\"')
    escaped = escaped.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return f'"{escaped}"'


def exec_line(arguments: list[str]) -> str:
    """One Exec value, a line for every option."""
    text = ""
    for argument in arguments:
        separator = " \\\n    " if argument.startswith("-") else " "
        text += (separator if text else "") + quote(argument)
    return text


def ray_unit(cluster: Cluster, name: str, run: list[str]) -> str:
    """vllm-ray.service of node `name`; `run` is its docker run."""
    role = cluster.hosts[name].role
    return _unit(
        cluster,
        f"Ray {role} of cluster {cluster.name}",
        container=commands.RAY,
        run=run,
        # What an earlier session left in /tmp would be taken for the running one.
        prepare=[["docker", "volume", "rm", "--force", commands.SHARED_TMP]],
        wait=None if role == "head" else commands.reach_at_boot(cluster, name),
    )


def serve_unit(cluster: Cluster, name: str, run: list[str], drains: bool) -> str:
    """vllm-serve.service of node `name`; `run` is its docker run.

    drains: this vLLM knows how to let running requests finish when it is stopped.
    """
    is_head = name == cluster.head
    is_drained = is_head and bool(cluster.deadlines.drain)
    stop = commands.drain(cluster, drains) if is_drained else None
    prepare = [commands.drain(cluster, drains, "open")] if is_drained and not drains else None
    if cluster.executor == "mp":
        return _unit(
            cluster,
            f"vllm serve of cluster {cluster.name}, node rank {cluster.nodes.index(name)}",
            container=commands.SERVE,
            run=run,
            prepare=prepare,
            wait=commands.gather(cluster, name) if cluster.workers else None,
            stop=stop,
        )
    return _unit(
        cluster,
        f"vllm serve of cluster {cluster.name}",
        container=commands.SERVE,
        run=run,
        prepare=prepare,
        wait=commands.ray_nodes_at_boot(cluster),
        stop=stop,
        relations=[f"After={commands.RAY}.service", f"PartOf={commands.RAY}.service"],
    )


def watchdog_units(cluster: Cluster) -> dict[str, str]:
    """vllm-watchdog.service and its timer, which ask on the head for a token; by file name."""
    return _repeated(
        commands.WATCHDOG,
        f"Ask vllm serve of cluster {cluster.name} for a token",
        every=cluster.watchdog.every,
        run=commands.watchdog(cluster),
        options=_remembers(commands.WATCHDOG),
        deadline=cluster.watchdog.deadline + 60,
    )


def ranks_units(cluster: Cluster, name: str) -> dict[str, str]:
    """vllm-ranks.service and its timer on node `name`, by file name.

    They look with executor mp whether the ranks still belong together, and end this one if not.
    """
    is_head = name == cluster.head
    whose = "all ranks belong" if is_head else "this rank belongs"
    return _repeated(
        commands.RANKS,
        f"See whether {whose} to the group of cluster {cluster.name}",
        every=WATCH_RANKS_SECONDS,
        run=commands.watch_ranks(cluster, name),
        # Every five seconds three lines that say nothing would bury the others.
        options=[*(_remembers(commands.RANKS) if is_head else []), "LogLevelMax=notice"],
        deadline=60,
    )


def _remembers(unit: str) -> list[str]:
    return [f"RuntimeDirectory={unit}", "RuntimeDirectoryPreserve=yes"]


def _repeated(
    name: str, what: str, *, every: int, run: list[str], options: list[str], deadline: int
) -> dict[str, str]:
    """A service and the timer that starts it `every` seconds; it may take `deadline` seconds."""
    service = [
        "# Written by multinode-vllm; change cluster.yaml and deploy instead of this file.",
        "[Unit]",
        f"Description={what}",
        f"After={commands.SERVE}.service",
        "",
        "[Service]",
        "Type=oneshot",
        f"ExecStart={exec_line(run)}",
        *options,
        f"TimeoutStartSec={deadline}",
    ]
    timer = [
        "# Written by multinode-vllm; change cluster.yaml and deploy instead of this file.",
        "[Unit]",
        f"Description={what} every {every} s",
        "",
        "[Timer]",
        f"OnActiveSec={every}",
        f"OnUnitInactiveSec={every}",
        "AccuracySec=1",
        "",
        "[Install]",
        "WantedBy=timers.target",
    ]
    return {
        f"{name}.service": "\n".join(service) + "\n",
        f"{name}.timer": "\n".join(timer) + "\n",
    }


def _unit(
    cluster: Cluster,
    description: str,
    *,
    container: str,
    run: list[str],
    prepare: list[list[str]] | None = None,
    wait: list[str] | None = None,
    stop: list[str] | None = None,
    relations: list[str] | None = None,
) -> str:
    restarts, deadlines = cluster.restarts, cluster.deadlines
    stop = stop or ["docker", "stop", "-t", str(deadlines.stop), container]
    lines = [
        "# Written by multinode-vllm; change cluster.yaml and deploy instead of this file.",
        "[Unit]",
        f"Description={description.replace('%', '%%')}",
        "After=docker.service network-online.target",
        "Wants=docker.service network-online.target",
        *(relations or []),
        # A crash loop ends in "failed". Waiting for a host that is down does not: the wait alone
        # takes longer than the limit allows.
        f"StartLimitIntervalSec={restarts.within}",
        f"StartLimitBurst={restarts.limit}",
        "",
        "[Service]",
        "Type=exec",
        *_remembers(container),
        f"ExecStartPre=-docker rm --force {container}",
        f"ExecStartPre=-{exec_line(commands.back_off(cluster, container))}",
        *(f"ExecStartPre=-{exec_line(command)}" for command in prepare or []),
        *([f"ExecStartPre={exec_line(wait)}"] if wait else []),
        f"ExecStart={exec_line(run)}",
        f"ExecStop=-{exec_line(stop)}",
        f"ExecStopPost=-docker rm --force {container}",
        "Restart=always",
        f"RestartSec={restarts.delay}",
        f"TimeoutStartSec={deadlines.boot + restarts.max_delay + 60}",
        f"TimeoutStopSec={deadlines.stop + deadlines.drain + 30}",
        # docker run ends with 128 + signal when it is stopped.
        "SuccessExitStatus=130 137 143",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"
