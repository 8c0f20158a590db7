"""How ssh reaches the hosts, as the text of an ssh_config file. Pure.

pyinfra takes jump hosts from an ssh_config only, and so does a person: ssh -F .cluster/ssh_config.
"""

from __future__ import annotations

from pathlib import Path

from cluster.settings import Cluster, Ssh


def ssh_config(cluster: Cluster, user_config: str | None) -> str:
    """Render an ssh_config with a Host block per host, and the user's own file behind them."""
    blocks = ["# Written by multinode-vllm from cluster.yaml; try: ssh -F .cluster/ssh_config HOST"]
    for name in cluster.hosts:
        ssh, jumps = cluster.ssh_of(name), cluster.jumps(name)
        blocks.append(_block(name, ssh, _jump_list(cluster, jumps)))
        if len(jumps) > 1:
            # pyinfra hands the name of every hop after the first to the hop before it as it is.
            blocks += [
                _block(str(cluster.ssh_of(jump).address), cluster.ssh_of(jump), None)
                for jump in jumps[1:]
            ]
    if user_config:
        blocks.append(f"Host *\n    Include {user_config}")
    return "\n\n".join(blocks) + "\n"


def _block(pattern: str, ssh: Ssh, jump_list: str | None) -> str:
    lines = [f"Host {pattern}", f"    HostName {ssh.address}"]
    if ssh.user:
        lines.append(f"    User {ssh.user}")
    if ssh.port != 22:  # a written 22 makes paramiko look for [host]:22 in known_hosts
        lines.append(f"    Port {ssh.port}")
    if ssh.key:
        lines.append(f"    IdentityFile {_local(ssh.key)}")
    if ssh.known_hosts:
        lines.append(f"    UserKnownHostsFile {_local(ssh.known_hosts)}")
    lines.append(f"    StrictHostKeyChecking {strictness(ssh)}")
    if jump_list:
        lines.append(f"    ProxyJump {jump_list}")
    return "\n".join(lines)


def strictness(ssh: Ssh) -> str:
    """A known_hosts file of one's own lists every host; else a new host is learned once."""
    return "yes" if ssh.known_hosts else "accept-new"


def _jump_list(cluster: Cluster, jumps: list[str]) -> str | None:
    if not jumps:
        return None
    hops = [jumps[0]]
    for jump in jumps[1:]:
        ssh = cluster.ssh_of(jump)
        user = f"{ssh.user}@" if ssh.user else ""
        hops.append(f"{user}{ssh.address}:{ssh.port}")
    return ",".join(hops)


def _local(path: str) -> str:
    return str(Path(path).expanduser().absolute())
