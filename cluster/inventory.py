"""pyinfra's view of a cluster: its hosts with their connection data, in two groups."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import paramiko

from cluster.settings import Cluster
from cluster.ssh import ssh_config, strictness

SSH_CONFIG = Path(".cluster/ssh_config")
"""Written beside the deploy files, ignored by git."""

HostData = tuple[str, dict[str, Any]]


class Prompt:
    """A paramiko transport whose small packets leave at once.

    With Nagle's algorithm on, every command waits about 40 ms for a delayed acknowledgement.
    """

    def __call__(self, sock: Any, **options: Any) -> paramiko.Transport:
        """Return a transport over `sock`, which is a channel where a jump host is in between."""
        if isinstance(sock, socket.socket):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return paramiko.Transport(sock, **options)

    def to_json(self) -> str:
        """For pyinfra's debug-inventory."""
        return "TCP_NODELAY"


def groups(cluster: Cluster) -> tuple[list[HostData], list[HostData]]:
    """Return the hosts of the groups head and workers; writes .cluster/ssh_config."""
    _write_ssh_config(cluster)
    prompt = Prompt()
    hosts = {name: _host_data(cluster, name, prompt) for name in cluster.nodes}
    return [(cluster.head, hosts[cluster.head])], [(name, hosts[name]) for name in cluster.workers]


def _host_data(cluster: Cluster, name: str, prompt: Prompt) -> dict[str, Any]:
    ssh = cluster.ssh_of(name)
    data: dict[str, Any] = {
        "cluster": cluster,
        "ssh_config_file": str(SSH_CONFIG),
        "ssh_strict_host_key_checking": strictness(ssh),
        "ssh_paramiko_connect_kwargs": {"transport_factory": prompt},
    }
    if ssh.key:
        data["ssh_look_for_keys"] = False
    if ssh.user != "root":
        data["_sudo"] = True
    return data


def _write_ssh_config(cluster: Cluster) -> None:
    own = Path("~/.ssh/config").expanduser()
    text = ssh_config(cluster, str(own) if own.is_file() else None)
    if SSH_CONFIG.is_file() and SSH_CONFIG.read_text(encoding="utf-8") == text:
        return
    SSH_CONFIG.parent.mkdir(exist_ok=True)
    fresh = SSH_CONFIG.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(SSH_CONFIG)
