"""Bring the lab up and down, and let tests reach into its hosts and break them.

The control machine talks to the lab through loopback only: spark-1's sshd and the API's port are
published there, and every other host is reached through spark-1. Nothing is ever sent to the lab's
own addresses from outside the lab.
"""

import hashlib
import io
import json
import shutil
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import engine as engines
from . import hosts as plan
from . import images
from .engine import STATE, Engine
from .hosts import Host
from .images import LABEL, NAME
from .shell import LabError, run, say

NETWORKS = ("fabric", "office")
IMAGE = "registry.lab:5000/vllm-cpu:lab"

_PUSHED = f"127.0.0.1:{plan.REGISTRY_PORT}/vllm-cpu:lab"
_READY_SECONDS = 60

# What --privileged would give a host, less CAP_SYS_RESOURCE: some machines cannot grant that one.
_CAPABILITIES = """
    AUDIT_CONTROL AUDIT_READ BLOCK_SUSPEND DAC_READ_SEARCH IPC_LOCK IPC_OWNER LEASE
    LINUX_IMMUTABLE NET_ADMIN NET_BROADCAST SYS_ADMIN SYS_BOOT SYS_NICE SYS_PTRACE SYS_TIME
    SYS_TTY_CONFIG SYSLOG WAKE_ALARM
""".split()  # noqa: SIM905  (as a list it would be a column of eighteen lines)


@dataclass(frozen=True)
class Lab:
    """The running lab: its hosts by name, spark-1 first."""

    engine: Engine
    hosts: list[str]

    def exec(self, host: str, *argv: str, check: bool = True, timeout: float = 60) -> str:
        """Run argv as root in a host and return its stdout.

        Raises LabError if it ends with another status than 0 (and check), or not within timeout
        seconds.
        """
        command = ["exec", self._container(host), *argv]
        return self.engine.docker(*command, timeout=timeout, check=check).stdout.decode()

    def write(self, host: str, files: dict[str, str]) -> None:
        """Write files in a host, by absolute path, and the folders that they need."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path, content in files.items():
                member = tarfile.TarInfo(path.lstrip("/"))
                member.size, member.mode = len(content.encode()), 0o644
                archive.addfile(member, io.BytesIO(content.encode()))
        # Not docker cp: it would write below a tmpfs, such as /run.
        argv = ["exec", "--interactive", self._container(host), "tar", "-xC", "/"]
        self.engine.docker(*argv, stdin=packed.getvalue())

    def restart(self, host: str) -> None:
        """Reboot a host in good order, and wait until it is up again."""
        self.engine.docker("restart", "-t", "30", self._container(host), timeout=90)
        self.wait(host)

    def kill(self, host: str) -> None:
        """Take a host's power away. `start` gives it back."""
        self.engine.docker("kill", self._container(host))

    def start(self, host: str) -> None:
        """Switch a host on, and wait until it is up."""
        self.engine.docker("start", self._container(host))
        self.wait(host)

    def link(self, host: str, network: str, up: bool) -> None:
        """Plug a host's cable to a network ("fabric" or "office") in, or pull it.

        `docker network disconnect` is no way to do that here: it looks for the name that it gave
        the interface, and the host has given it a better one.
        """
        if network not in NETWORKS:
            raise LabError(f"no network {network!r} in the lab: it has {', '.join(NETWORKS)}")
        self.exec(host, "ip", "link", "set", f"{network}0", "up" if up else "down")
        if up:
            self.exec(host, "lab-net")  # the default route went with the link

    def wait(self, host: str) -> None:
        """Wait until a host has booted and its Docker engine and sshd answer."""
        # Not is-system-running: a unit of the cluster may wait for another host for minutes.
        probe = (
            "docker info -f {{.Driver}} && timeout 2 bash -c '</dev/tcp/127.0.0.1/22' "
            "&& ip -br addr show fabric0"
        )
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            try:
                self.exec(host, "sh", "-c", probe, timeout=_READY_SECONDS)
                return
            except LabError as problem:
                if time.monotonic() > deadline:
                    failed = self.exec(host, "systemctl", "--failed", "--no-legend", check=False)
                    raise LabError(
                        f"{host} is not up after {_READY_SECONDS} s: {problem}\n{failed}"
                    ) from None
            time.sleep(0.3)

    def _container(self, host: str) -> str:
        if host not in self.hosts:
            raise LabError(f"no host {host!r} in the lab: it has {', '.join(self.hosts)}")
        return f"{NAME}-{host}"


def build() -> Engine:
    """Make the images and the model, as far as they are not there yet."""
    engine = engines.start()
    _images(engine, plan.RELEASES)
    return engine


def up(hosts: int = 2) -> Lab:
    """Bring the lab up with so many hosts, keeping what is up already and still as wanted."""
    if not 1 <= hosts <= 100:
        raise LabError("the lab can have 1 to 100 hosts")
    engine = engines.start()
    with ThreadPoolExecutor() as pool:
        members = plan.hosts(hosts)
        host_images, vllm_image, model = _images(engine, {host.release for host in members})
        plan.write_ssh_files(members)
        lab = Lab(engine, [host.name for host in members])
        _networks(engine)
        _remove_extra(engine, lab)
        _registry(engine, host_images[members[0].release])
        flags = _privileges(engine, host_images[members[0].release])
        files = model.read_bytes()
        fresh = [
            host for host in members if _host(engine, host, host_images[host.release], flags, files)
        ]
        pushed = pool.submit(_push, engine, vllm_image)
        for host in members:
            lab.wait(host.name)
            if host in fresh:
                _forget_containers(lab, host.name)
            _ssh(host)
            say(f"{host.name} is up")
        pushed.result()
    say("the lab is up")
    return lab


def existing() -> Lab | None:
    """The lab, if it is up; starts nothing."""
    engine = engines.find()
    if engine is None:
        return None
    found = _containers(engine, "label=mnvllm.lab.host")
    return Lab(engine, sorted(found, key=lambda name: int(name[6:]))) if found else None


def down(purge: bool = False) -> None:
    """Remove hosts, registry and networks, and stop the private engine.

    Images and volumes stay as a cache, unless purge: then everything the lab ever made goes.
    """
    engine = engines.find()
    if engine is None and purge and (STATE / "engine").exists():
        engine = engines.start()  # only a running engine takes its mounts and files back in order
    if engine:
        _remove(engine, "ps -aq", "rm -f -v")
        _remove(engine, "network ls -q", "network rm")
        if purge:
            _remove(engine, "volume ls -q", "volume rm -f")
            _remove(engine, "image ls -aq", "rmi -f")
            bases = [images.base_tag(release) for release in plan.RELEASES]
            engine.docker("rmi", "-f", *bases, _PUSHED, check=False)
        say("hosts, registry and networks removed" + (", images and volumes too" if purge else ""))
    engines.stop()
    if purge:
        shutil.rmtree(STATE, ignore_errors=True)


def summary(lab: Lab) -> str:
    """How to reach the lab, for a person."""
    hosts = [f"{host.name} (Debian {host.release})" for host in plan.hosts(len(lab.hosts))]
    lines = [
        f"hosts      {', '.join(hosts)}",
        *(f"ssh        ssh -F {plan.SSH_CONFIG} {host}" for host in lab.hosts),
        f"API        http://127.0.0.1:{plan.API_PORT} (spark-1, port {plan.API_PORT})",
        f"image      {IMAGE}",
        "model      /srv/models/tiny on spark-1 alone; a deploy brings it to the others",
    ]
    if lab.engine.private:
        lines.append(f"engine     DOCKER_HOST={lab.engine.environment()['DOCKER_HOST']}")
    return "\n".join(lines)


def _images(engine: Engine, releases: Iterable[str]) -> tuple[dict[str, str], str, Path]:
    """The host images by release, the vLLM image and the model, as far as need be made."""
    with ThreadPoolExecutor() as pool:
        hosts = {each: pool.submit(images.host_image, engine, each) for each in releases}
        vllm_image = images.vllm_image(engine)
        model = images.tiny_model(engine, vllm_image)
        return {each: made.result() for each, made in hosts.items()}, vllm_image, model


def _networks(engine: Engine) -> None:
    present = engine.text("network", "ls", "--format", "{{.Name}}").split()
    for network, subnet in (("fabric", plan.FABRIC), ("office", plan.OFFICE)):
        name = f"{NAME}-{network}"
        if name in present:
            continue
        # No way out of the fabric: a host that has nothing else has no default route.
        argv = ["network", "create", "--label", LABEL, "--subnet", subnet]
        argv += ["--internal"] if network == "fabric" else []
        # A bridge of a fixed name: what an engine that was killed left behind is taken over, and
        # not doubled by a second bridge with the same addresses.
        argv += ["--opt", f"com.docker.network.bridge.name=mnvllm-{network}"]
        try:
            engine.docker(*argv, name)
        except LabError as problem:
            raise LabError(f"{subnet} may be in use on this machine already.\n{problem}") from None


def _registry(engine: Engine, image: str) -> None:
    argv = ["--network", f"{NAME}-office", "--ip", plan.REGISTRY_OFFICE]
    argv += ["--publish", f"127.0.0.1:{plan.REGISTRY_PORT}:5000"]
    argv += ["--volume", f"{NAME}-registry:/var/lib/registry", "--entrypoint", "docker-registry"]
    argv += [image, "serve", "/etc/lab/registry.yml"]
    _container(engine, "registry", argv, lambda container: None)


def _host(engine: Engine, host: Host, image: str, flags: list[str], model: bytes) -> bool:
    """Create and start a host, unless it runs as wanted. True if it is a new one."""
    argv = ["--hostname", host.name, *flags, "--label", "mnvllm.lab.host"]
    argv += ["--env", "container=docker", "--stop-signal", "SIGRTMIN+3"]
    argv += ["--tmpfs", "/run", "--tmpfs", "/run/lock", "--tmpfs", "/tmp:exec,mode=1777"]
    argv += ["--volume", f"{NAME}-{host.name}:/var/lib/docker"]
    fabric = ["--ip", host.fabric]
    if host.office:
        argv += ["--network", f"{NAME}-office", "--ip", host.office]
        argv += ["--publish", f"127.0.0.1:{plan.SSH_PORT}:22"]
        argv += ["--publish", f"127.0.0.1:{plan.API_PORT}:{plan.API_PORT}"]
    else:
        argv += ["--network", f"{NAME}-fabric", *fabric]
    files = plan.host_files(host)

    def prepare(container: str) -> None:
        if host.office:
            engine.docker("network", "connect", *fabric, f"{NAME}-fabric", container)
        engine.docker("cp", "-", f"{container}:/", stdin=files)
        if host.office:
            engine.docker("cp", "-", f"{container}:/srv/models", stdin=model)

    version = hashlib.sha256(files + (model if host.office else b"")).hexdigest()
    return _container(engine, host.name, [*argv, image], prepare, version)


def _container(
    engine: Engine, name: str, argv: list[str], prepare: Callable[[str], None], version: str = ""
) -> bool:
    """Run a container, replacing one that is not made of the same. True if it is a new one."""
    container = f"{NAME}-{name}"
    wanted = hashlib.sha256(repr((argv, version)).encode()).hexdigest()
    form = '{{.State.Running}} {{index .Config.Labels "mnvllm.lab.hash"}}'
    if engine.text("container", "inspect", "-f", form, container, check=False) == f"true {wanted}":
        return False
    engine.docker("rm", "-f", "-v", container, check=False)
    labels = ["--label", LABEL, "--label", f"mnvllm.lab.hash={wanted}"]
    volumes = {word.split(":")[0] for word in argv if word.startswith(f"{NAME}-") and ":/" in word}
    for volume in volumes:
        engine.docker("volume", "create", "--label", LABEL, volume)
    engine.docker("create", "--name", container, *labels, *argv)
    prepare(container)
    engine.docker("start", container)
    return True


def _privileges(engine: Engine, image: str) -> list[str]:
    """The flags that let systemd and a Docker engine run in a container of this engine."""
    probe = ["run", "--rm", "--network", "none", "--privileged", "--entrypoint", "true", image]
    privileged = engine.docker(*probe, check=False).returncode == 0
    shared_cgroups = ["--cgroupns", "host", "--volume", "/sys/fs/cgroup:/sys/fs/cgroup:rw"]
    if privileged:
        version = engine.text("info", "-f", "{{.CgroupVersion}}")
        private = ["--cgroupns", "private"]
        return ["--privileged", *(private if version == "2" else shared_cgroups)]
    flags = [word for name in _CAPABILITIES for word in ("--cap-add", name)]
    for option in ("seccomp=unconfined", "apparmor=unconfined", "systempaths=unconfined"):
        flags += ["--security-opt", option]
    return [*flags, "--device-cgroup-rule", "a *:* rwm", *shared_cgroups]


def _push(engine: Engine, image: str) -> None:
    identity = engine.text("image", "inspect", "-f", "{{.Id}}", image)
    if identity in _registry_holds():
        return
    say("pushing the vLLM image to the lab's registry")
    engine.docker("tag", image, _PUSHED)
    engine.docker("push", "-q", _PUSHED, timeout=900)
    say("pushed")


def _registry_holds() -> set[str]:
    """The ids by which an engine may know the image in the registry: of manifest and config."""
    host, _, rest = _PUSHED.partition("/")
    name, _, tag = rest.partition(":")
    kinds = (
        "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.oci.image.index.v1+json",
    )
    request = urllib.request.Request(
        f"http://{host}/v2/{name}/manifests/{tag}", headers={"Accept": ", ".join(kinds)}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 20
    while True:
        try:
            with direct.open(request, timeout=5) as answer:
                body = answer.read()
                digest = str(answer.headers.get("Docker-Content-Digest"))
            return {digest, str(json.loads(body).get("config", {}).get("digest"))}
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return set()
            raise LabError(f"the lab's registry answers {error}") from None
        except OSError as problem:  # it may still be starting
            if time.monotonic() > deadline:
                raise LabError(f"the lab's registry does not answer: {problem}") from None
        time.sleep(0.2)


def _forget_containers(lab: Lab, host: str) -> None:
    """A new host has its predecessor's image, which is the point, but not its containers."""
    for kind, remove in (("ps -a", "rm -f -v"), ("volume ls", "volume rm")):
        lab.exec(host, "sh", "-c", f"docker {kind} -q | xargs -r docker {remove}")
    lab.exec(host, "docker", "image", "prune", "-f")  # those that a newer one replaced


def _ssh(host: Host) -> None:
    argv = ["ssh", "-F", str(plan.SSH_CONFIG), "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    run([*argv, host.name, "sudo -n true"], timeout=30)


def _remove_extra(engine: Engine, lab: Lab) -> None:
    for name in _containers(engine, "label=mnvllm.lab.host"):
        if name not in lab.hosts:
            engine.docker("rm", "-f", "-v", f"{NAME}-{name}")


def _containers(engine: Engine, label: str) -> list[str]:
    names = engine.text("ps", "--filter", label, "--format", "{{.Names}}").split()
    return [name.removeprefix(f"{NAME}-") for name in names]


def _remove(engine: Engine, listing: str, removal: str) -> None:
    found = engine.text(*listing.split(), "--filter", f"label={LABEL}").split()
    if found:
        engine.docker(*removal.split(), *dict.fromkeys(found), timeout=120)
