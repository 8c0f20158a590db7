"""pyinfra's view of a cluster: its hosts with their connection data, in two groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.settings import Cluster
from cluster.ssh import ssh_config, strictness
from cluster.transport import Channel, Transports

SSH_CONFIG = Path(".cluster/ssh_config")
"""Written beside the deploy files for people (ssh -F), ignored by git."""

HostData = tuple[str, dict[str, Any]]


def groups(cluster: Cluster) -> tuple[list[HostData], list[HostData]]:
    """Return the hosts of the groups head and workers; writes .cluster/ssh_config."""
    _write_ssh_config(cluster)
    hosts = {name: _host_data(cluster, name) for name in cluster.nodes}
    return [(cluster.head, hosts[cluster.head])], [(name, hosts[name]) for name in cluster.workers]


def _host_data(cluster: Cluster, name: str) -> dict[str, Any]:
    ssh = cluster.ssh_of(name)
    address, port = str(ssh.address), ssh.port or 22
    options: dict[str, Any] = {"transport_factory": Transports(name)}
    data: dict[str, Any] = {
        "cluster": cluster,
        "ssh_hostname": address,
        "ssh_strict_host_key_checking": strictness(ssh),
        "ssh_paramiko_connect_kwargs": options,
    }
    if port != 22:
        data["ssh_port"] = port
    if ssh.user:
        data["ssh_user"] = ssh.user
    if ssh.key:
        # Not pyinfra's ssh_key: that one asks for a passphrase even where an agent holds the key.
        options["key_filename"] = str(Path(ssh.key).expanduser())
        data["ssh_look_for_keys"] = False
    if ssh.known_hosts:
        data["ssh_known_hosts_file"] = str(Path(ssh.known_hosts).expanduser())
    if ssh.via:
        options["sock"] = Channel(ssh.via, address, port)
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
