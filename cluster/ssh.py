"""How ssh reaches the hosts, as the text of an ssh_config file for people. Pure."""

from __future__ import annotations

from pathlib import Path

from cluster.settings import Cluster, Ssh


def ssh_config(cluster: Cluster, user_config: str | None) -> str:
    """Render an ssh_config with a Host block per host, and the user's own file behind them."""
    blocks = ["# Written by multinode-vllm from cluster.yaml; try: ssh -F .cluster/ssh_config HOST"]
    blocks += [_block(name, cluster.ssh_of(name)) for name in cluster.hosts]
    if user_config:
        blocks.append(f"Host *\n    Include {user_config}")
    return "\n\n".join(blocks) + "\n"


def _block(name: str, ssh: Ssh) -> str:
    lines = [f"Host {name}", f"    HostName {ssh.address}"]
    if ssh.user:
        lines.append(f"    User {ssh.user}")
    if ssh.port != 22:
        lines.append(f"    Port {ssh.port}")
    if ssh.key:
        lines.append(f"    IdentityFile {_local(ssh.key)}")
    if ssh.known_hosts:
        lines.append(f"    UserKnownHostsFile {_local(ssh.known_hosts)}")
    lines.append(f"    StrictHostKeyChecking {strictness(ssh)}")
    if ssh.via:
        lines.append(f"    ProxyJump {ssh.via}")
    return "\n".join(lines)


def strictness(ssh: Ssh) -> str:
    """A known_hosts file of one's own lists every host; else a new host is learned once."""
    return "yes" if ssh.known_hosts else "accept-new"


def _local(path: str) -> str:
    return str(Path(path).expanduser().absolute())
