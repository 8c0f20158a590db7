"""The lab's hosts as data: addresses, names, and the files each host gets before its first boot."""

import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path

from .engine import STATE
from .shell import run

FABRIC = "192.168.200.0/24"
OFFICE = "10.1.230.0/24"
REGISTRY_OFFICE = "10.1.230.2"
REGISTRY_PORT = 15000
SSH_PORT = 22122
API_PORT = 28000

SSH_FOLDER = STATE / "ssh"
CLIENT_KEY = SSH_FOLDER / "id_ed25519"
KNOWN_HOSTS = SSH_FOLDER / "known_hosts"
SSH_CONFIG = SSH_FOLDER / "config"

RELEASES = ("bookworm", "trixie")
"""Debian 12 (systemd 252, Docker 20.10) and 13 (systemd 257, Docker 26): the hosts take turns."""

_DAEMON = {"insecure-registries": ["registry.lab:5000"]}
_CONTAINERD_STORE = {"containerd-snapshotter": True}

_OFFICE_GATEWAY = "10.1.230.1"


@dataclass(frozen=True)
class Host:
    """One lab host. Only the first is on the office network, and has a default route."""

    name: str
    fabric: str
    office: str | None
    release: str
    """Code name of its Debian."""

    @property
    def has_containerd_store(self) -> bool:
        """Whether its Docker keeps images in containerd's store, as new installations of it do."""
        return self.release == "trixie"

    @property
    def interfaces(self) -> str:
        """/etc/lab/interfaces: address, interface name, and the gateway of the default route."""
        lines = f"{self.fabric} fabric0\n"
        return lines + (f"{self.office} office0 {_OFFICE_GATEWAY}\n" if self.office else "")

    @property
    def etc_hosts(self) -> str:
        """/etc/hosts: the host's own name is not its fabric address, as on any Debian."""
        return (
            f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n{REGISTRY_OFFICE} registry.lab\n"
            "::1 localhost ip6-localhost\n"
        )


def hosts(count: int) -> list[Host]:
    """The first `count` hosts: spark-1 with both networks, the others with the fabric alone."""
    return [
        Host(
            f"spark-{i}",
            f"192.168.200.{11 + i}",
            "10.1.230.180" if i == 1 else None,
            RELEASES[(i - 1) % len(RELEASES)],
        )
        for i in range(1, count + 1)
    ]


def write_ssh_files(members: list[Host]) -> None:
    """Make the keys that are missing, and write known_hosts and an ssh config for these hosts.

    Host keys are made here and not in the hosts, so that they outlive them.
    """
    SSH_FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    known: list[str] = []
    config = f"Host *\n  User deploy\n  IdentityFile {CLIENT_KEY}\n  IdentitiesOnly yes\n"
    config += f"  UserKnownHostsFile {KNOWN_HOSTS}\n  StrictHostKeyChecking yes\n"
    _make_key(CLIENT_KEY)
    for host in members:
        _make_key(_host_key(host))
        public = " ".join(_public(_host_key(host)).split()[:2])
        known.append(f"{host.fabric} {public}\n")
        config += f"Host {host.name}\n"
        if host.office:
            known.append(f"[127.0.0.1]:{SSH_PORT} {public}\n")
            config += f"  HostName 127.0.0.1\n  Port {SSH_PORT}\n"
        else:
            config += f"  HostName {host.fabric}\n  ProxyJump {members[0].name}\n"
    KNOWN_HOSTS.write_text("".join(known))
    SSH_CONFIG.write_text(config)


def host_files(host: Host) -> bytes:
    """A tar archive, rooted at /, of what makes a host of its release's image this one."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:

        def add(path: str, content: str, mode: int = 0o644, owner: int = 0) -> None:
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content.encode()), mode
            member.uid = member.gid = owner
            archive.addfile(member, io.BytesIO(content.encode()))

        def folder(path: str, mode: int = 0o755, owner: int = 0) -> None:
            member = tarfile.TarInfo(path)
            member.type, member.mode = tarfile.DIRTYPE, mode
            member.uid = member.gid = owner
            archive.addfile(member)

        add("etc/lab/interfaces", host.interfaces)
        add("etc/lab/hosts", host.etc_hosts)
        add("etc/ssh/ssh_host_ed25519_key", _host_key(host).read_text(), mode=0o600)
        add("etc/ssh/ssh_host_ed25519_key.pub", _public(_host_key(host)))
        folder("home/deploy/.ssh", mode=0o700, owner=1000)
        add("home/deploy/.ssh/authorized_keys", _public(CLIENT_KEY), mode=0o600, owner=1000)
        folder("srv/models")
        features = {"features": _CONTAINERD_STORE} if host.has_containerd_store else {}
        add("etc/docker/daemon.json", json.dumps(_DAEMON | features))
        if host.has_containerd_store:
            add("etc/containerd/config.toml", 'version = 2\nroot = "/var/lib/docker/containerd"\n')
    return packed.getvalue()


def _make_key(path: Path) -> None:
    if not path.exists():
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)]
        run(argv, timeout=20)


def _host_key(host: Host) -> Path:
    return SSH_FOLDER / f"host-{host.name}"


def _public(key: Path) -> str:
    return key.with_name(key.name + ".pub").read_text()
