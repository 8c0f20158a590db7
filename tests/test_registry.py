"""The relay of images, for real: its programs as a host starts them, between a registry and Docker.

Registry and Docker are tests/fake_registry.py's; everything goes over loopback addresses.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import json
import lzma
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster.encryption import certificate
from cluster.remote import wire
from cluster.remote.registry import loopback, upstream
from cluster.remote.registry.source import Reference, Source
from tests.fake_registry import FAKE_DOCKER, Image, Registry, served, sha
from tests.started import HEAD, MIB, SECRETS, Ended, Proxy, end, free_port, start, wait_for

TAG = "registry.example/acme/vllm:1"


@dataclass
class Machine:
    """A host: its Docker and its home."""

    home: Path
    path: str

    def start(self, wanted: dict[str, Any], secrets: dict[str, str]) -> subprocess.Popen[str]:
        """Start a role here."""
        env = {"PATH": self.path, "FAKE_DOCKER": str(self.home), "HOME": str(self.home)}
        return start("registry", wanted, secrets, env)

    @property
    def names(self) -> dict[str, str]:
        """The images that its Docker has, by name."""
        path = self.home / "names.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def log_in(self, host: str, login: str) -> None:
        """Have a file as docker login leaves it."""
        (self.home / ".docker").mkdir(exist_ok=True)
        auths = {host: {"auth": base64.b64encode(login.encode()).decode()}}
        (self.home / ".docker/config.json").write_text(json.dumps({"auths": auths}))


@dataclass
class Site:
    """A head and workers, with the fake registry outside."""

    folder: Path
    path: str
    outside: Registry
    image: Image
    secrets: dict[str, str] = field(default_factory=lambda: dict(SECRETS))
    keys: dict[str, Any] = field(default_factory=dict)
    """For all roles."""
    ports: list[int] = field(default_factory=lambda: [free_port()])
    machines: list[Machine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = {"patience": 10, "stall": 3, **self.keys}
        self.add()
        self.add()

    def add(self) -> None:
        home = self.folder / f"host{len(self.machines) + 1}"
        home.mkdir()
        docker = {"RegistryConfig": {"InsecureRegistryCIDRs": ["127.0.0.0/8"]}}
        (home / "info.json").write_text(json.dumps(docker))
        self.machines.append(Machine(home, self.path))

    @property
    def head(self) -> Machine:
        return self.machines[0]

    @property
    def workers(self) -> list[Machine]:
        return self.machines[1:]

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def reference(self) -> str:
        return f"{self.outside.host}/{self.outside.repository}:1"

    def resolve(self, **keys: Any) -> Ended:
        wanted = {"role": "resolve", "image": self.reference, "cache": str(self.cache), **keys}
        return end(self.head.start(wanted, {}))

    def common(self, **keys: Any) -> dict[str, Any]:
        return {
            **{"image": self.reference, "digest": self.image.digest, "tag": TAG},
            **{"address": HEAD, "ports": self.ports, **self.keys, **keys},
        }

    def serve(self, **keys: Any) -> subprocess.Popen[str]:
        receivers = [
            {"name": f"spark-{n}", "address": f"127.0.0.{n}"} for n, _ in enumerate(self.workers, 2)
        ]
        wanted = self.common(role="serve", receivers=receivers, cache=str(self.cache))
        return self.head.start({**wanted, **keys}, self.secrets)

    def receive(
        self, index: int = 0, secrets: dict[str, str] | None = None, **keys: Any
    ) -> subprocess.Popen[str]:
        own = {"name": f"spark-{index + 2}", "source": f"127.0.0.{index + 2}", "index": index}
        wanted = self.common(role="receive", sender="spark-1", **own)
        return self.workers[index].start({**wanted, **keys}, secrets or self.secrets)

    def run(self, **keys: Any) -> tuple[Ended, list[Ended]]:
        """Start all, wait for all."""
        head = self.serve(**keys)
        shared = {name: value for name, value in keys.items() if name in ("image", "digest", "tag")}
        workers = [self.receive(index, **shared) for index, _ in enumerate(self.workers)]
        ended = [end(each) for each in workers]
        return end(head), ended

    def has_it(self, *machines: Machine) -> bool:
        """Whether hosts have the image under its name, and under no other."""
        return all(each.names == {TAG: self.image.id} for each in machines or self.machines)

    def is_clean(self) -> bool:
        """Whether nothing listens on our ports."""
        for port in self.ports:
            with socket.socket() as probe:
                if probe.connect_ex((HEAD, port)) == 0:
                    return False
        return True


@pytest.fixture
def path(tmp_path: Path) -> str:
    """PATH with our docker first."""
    folder = tmp_path / "bin"
    folder.mkdir()
    docker = folder / "docker"
    docker.write_text(f"#!{sys.executable} -S\n{FAKE_DOCKER}")
    docker.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture
def site(tmp_path: Path, path: str) -> Iterator[Site]:
    image = Image.make(400_000, 3 * MIB, 10)
    with served(Registry()) as outside:
        outside.push(image)
        yield Site(tmp_path, path, outside, image)


def flip(proxy: Proxy, position: int) -> None:
    """Have a proxy change the byte at a position of what passes."""

    def spoil(data: bytearray) -> None:
        begin = proxy.passed - len(data)
        if begin <= position < proxy.passed:
            data[position - begin] ^= 1

    proxy.spoil = spoil


def test_every_host_has_the_image_and_each_blob_came_from_outside_once(site: Site) -> None:
    site.add()
    found = site.resolve()
    assert (found.code, found.result["digest"]) == (0, site.image.digest)
    assert found.result["bytes"] == sum(map(len, site.image.blobs.values()))

    head, workers = site.run()

    assert [(each.code, each.err) for each in (head, *workers)] == [(0, "")] * 3
    assert site.has_it()
    for digest in site.image.blobs:
        assert site.outside.count(digest) == 1
    assert {each.result["id"] for each in (head, *workers)} == {site.image.id}
    size = sum(map(len, site.image.blobs.values()))
    assert head.result["downloaded"] == size
    assert head.result["served"] == 3 * size
    assert head.result["receivers"]["spark-3"] == {"state": "done", "reason": ""}
    assert size < workers[0].result["received"] < size + 3000
    assert head.result["kept"] == 0
    assert not site.cache.exists()
    assert site.is_clean()


def test_docker_that_asks_for_tls_first(site: Site) -> None:
    """With containerd's image store it does, on the head as on a worker."""
    for machine in site.machines:
        (machine.home / "containerd").touch()

    head, workers = site.run()

    assert [(each.code, each.err) for each in (head, *workers)] == [(0, "")] * 2
    assert site.has_it()
    assert site.is_clean()


def test_only_missing_layers_travel(site: Site) -> None:
    site.add()
    site.run()
    newer = Image.make(400_000, 3 * MIB, 10, 5000)
    site.outside.push(newer)
    before = len(site.outside.requests)

    head, workers = site.run(digest=newer.digest)

    assert (head.code, workers[0].code) == (0, 0)
    assert site.head.names == {TAG: newer.id} == site.workers[1].names
    assert workers[0].result["received"] < 12_000
    assert not any(
        digest in path
        for digest in site.image.layer_digests
        for _, path, _, _ in site.outside.requests[before:]
    )


def test_the_head_need_not_pull(site: Site) -> None:
    site.add()
    head = site.serve(tag=None)
    workers = [end(site.receive(n)) for n in range(2)]
    ended = end(head)
    assert (ended.code, ended.result["id"], site.head.names) == (0, None, {})
    assert all(each.code == 0 for each in workers)
    assert site.has_it(*site.workers)


def test_an_index_is_resolved_to_its_own_digest_and_each_host_takes_its_platform(
    site: Site,
) -> None:
    other = Image.make(50, seed=9)
    digest = site.outside.push_index(site.image, other)
    found = site.resolve().result
    assert (found["digest"], found["bytes"]) == (digest, None)

    head, workers = site.run(digest=digest)

    assert (head.code, workers[0].code) == (0, 0)
    assert site.has_it()
    assert not any(site.outside.count(each) for each in other.layer_digests)


def test_a_tag_that_moves_meanwhile_changes_nothing(site: Site) -> None:
    digest = site.resolve().result["digest"]
    site.outside.push(Image.make(77, seed=5))
    head, _ = site.run(digest=digest)
    assert head.code == 0
    assert site.has_it()


def test_tokens_logins_and_a_storage_that_does_not_see_them(site: Site) -> None:
    site.outside.auth, site.outside.redirects = "bearer", True
    site.outside.users = {"ann": "secret"}
    site.head.log_in(site.outside.host, "ann:secret")

    head, workers = site.run()

    assert (head.code, workers[0].code) == (0, 0)
    assert site.has_it()
    at_storage = [login for where, _, _, login in site.outside.requests if where == "storage"]
    assert at_storage == [""] * len(site.image.blobs)
    assert "secret" not in head.out + head.err


def test_basic_login(site: Site) -> None:
    site.outside.auth, site.outside.users = "basic", {"ann": "secret"}
    site.head.log_in(site.outside.host, "ann:secret")
    assert site.resolve().result["digest"] == site.image.digest


def test_login_from_a_credential_helper(site: Site) -> None:
    site.outside.auth, site.outside.users = "basic", {"ann": "secret"}
    helper = site.folder / "bin/docker-credential-safe"
    helper.write_text('#!/bin/sh\necho \'{"Username": "ann", "Secret": "secret"}\'\n')
    helper.chmod(0o755)
    (site.head.home / ".docker").mkdir()
    (site.head.home / ".docker/config.json").write_text('{"credsStore": "safe"}')
    assert site.resolve().result["digest"] == site.image.digest


@pytest.mark.parametrize("auth", ["bearer", "basic"])
def test_without_a_login_it_says_which_one_to_do(site: Site, auth: str) -> None:
    site.outside.auth, site.outside.users = auth, {"ann": "secret"}
    found = site.resolve()
    assert found.code == 1
    assert f"run: docker login {site.outside.host}" in found.err
    assert f"there is no {site.head.home}/.docker/config.json" in found.err
    site.head.log_in(site.outside.host, "ann:old")
    assert "the login of ann" in site.resolve().err


def test_no_such_tag(site: Site) -> None:
    found = site.resolve(image=f"{site.outside.host}/acme/vllm:2")
    assert (found.code, found.result["error"]) == (1, found.err.strip())
    assert "has no 2 of acme/vllm (404)" in found.err


def test_limit_of_pulls(site: Site) -> None:
    site.outside.faults = {"manifests": 429}
    found = site.resolve()
    assert "its limit of pulls is reached (429)" in found.err
    assert "Wait 77 s" in found.err


def test_registry_that_is_not_there(site: Site) -> None:
    port = free_port()
    found = site.resolve(image=f"{HEAD}:{port}/acme/vllm:1")
    assert "the head cannot reach the registry" in found.err
    assert "Connection refused" in found.err
    assert "Traceback" not in found.err
    assert "cannot resolve the name" in site.resolve(image="no-such-host.invalid/a/b:1").err


def test_plain_http_needs_dockers_permission(site: Site) -> None:
    (site.head.home / "info.json").write_text("{}")
    found = site.resolve()
    assert found.code == 1
    assert "insecure-registries" in found.err
    index = {site.outside.host: {"Secure": False}}
    (site.head.home / "info.json").write_text(
        json.dumps({"RegistryConfig": {"IndexConfigs": index}})
    )
    assert site.resolve().code == 0


@pytest.mark.skipif(not shutil.which("openssl"), reason="makes a certificate")
def test_certificate_of_an_unknown_authority(tmp_path: Path, path: str) -> None:
    argv = "openssl req -x509 -newkey rsa:2048 -nodes -keyout k -out c -days 2 -subj /CN=127.0.0.1"
    subprocess.run(argv.split(), cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "c", tmp_path / "k")
    image = Image.make(10)
    with served(Registry(), context) as outside:
        outside.push(image)
        site = Site(tmp_path, path, outside, image)
        # Docker takes any certificate where it is told that the registry is insecure.
        assert site.resolve().result["digest"] == image.digest
        (site.head.home / "info.json").write_text("{}")
        found = site.resolve()
    assert found.code == 1
    assert f"put the authority's certificate into /etc/docker/certs.d/{outside.host}" in found.err


@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_broken_connections_to_the_registry_are_resumed(site: Site, ignores_ranges: bool) -> None:
    site.add()
    site.outside.breaks = [300_000, 2 * MIB // 3]
    site.outside.ignores_ranges = ignores_ranges
    head, workers = site.run()
    assert (head.code, workers[1].code) == (0, 0)
    assert site.has_it()
    asked = {asked for _, _, asked, _ in site.outside.requests}
    assert asked - {"", "bytes=0-"}
    assert head.result["downloaded"] == sum(map(len, site.image.blobs.values()))


def test_a_login_that_ends_in_the_middle_reaches_every_host(site: Site) -> None:
    site.outside.faults = {site.image.layer_digests[1]: 403}
    head, workers = site.run()
    assert {each.code for each in (head, *workers)} == {1}
    assert "does not let the head read acme/vllm (403)" in head.err
    for each in workers:
        assert each.err.startswith("spark-1: ")
        assert "docker login" in each.err
    assert not any(each.names for each in site.machines)
    site.outside.faults = {}
    before = site.outside.count(site.image.layer_digests[0])
    assert site.run()[0].code == 0
    assert site.has_it()
    # What had come by then was kept.
    assert site.outside.count(site.image.layer_digests[0]) == before
    assert not site.cache.exists()


def test_an_image_that_is_gone_reaches_every_host_at_once(site: Site) -> None:
    began = time.monotonic()
    head, workers = site.run(digest=sha(b"gone"))
    assert {each.code for each in (head, *workers)} == {1}
    assert "(404)" in workers[0].err
    assert time.monotonic() - began < 6


def test_a_registry_that_sends_something_else(site: Site) -> None:
    layer = site.image.layer_digests[1]
    site.outside.blobs[layer] = bytes(len(site.image.blobs[layer]))
    head, workers = site.run()
    assert {each.code for each in (head, *workers)} == {1}
    assert "has another sha256" in head.err
    site.outside.push(site.image)
    assert site.run()[0].code == 0
    assert site.has_it()


def test_leftovers_in_the_cache_are_checked_before_use(site: Site) -> None:
    first, second = site.image.layer_digests[:2]
    site.cache.mkdir()
    (site.cache / first[7:]).write_bytes(bytes(len(site.image.blobs[first])))
    (site.cache / (second[7:] + ".part")).write_bytes(site.image.blobs[second][:1000])
    (site.cache / "mine").write_text("not ours")
    head, _ = site.run()
    assert head.code == 0
    assert site.has_it()
    asked = [asked for _, path, asked, _ in site.outside.requests if second in path]
    assert asked == ["bytes=1000-"]
    assert [each.name for each in site.cache.iterdir()] == ["mine"]


def test_link_cut_in_the_middle(site: Site) -> None:
    site.add()
    proxy = Proxy(site.ports[0])
    site.outside.rate = 1_000_000
    head = site.serve()
    cut = site.receive(0, ports=[proxy.port])
    other = site.receive(1)
    wait_for(lambda: proxy.passed > 100_000)
    proxy.is_frozen = True
    site.outside.rate = 0
    ended = end(cut)
    assert ended.code == 1
    assert "nothing came from spark-1 at 127.0.0.1 for 3 s: the link is cut" in ended.err
    assert end(other).code == 0
    found = end(head)
    proxy.close()
    assert found.code == 0
    assert found.result["receivers"]["spark-2"]["state"] == "failed"
    assert found.result["kept"] > 0
    assert not site.workers[0].names
    assert site.is_clean()
    assert site.run()[1][0].code == 0
    assert site.has_it()


def test_head_killed_in_the_middle(site: Site) -> None:
    site.add()
    site.outside.rate = 500_000
    head = site.serve()
    workers = [site.receive(n) for n in range(2)]
    wait_for(lambda: any(each.stat().st_size for each in site.cache.glob("*.part")))
    head.kill()
    for each in workers:
        ended = end(each)
        assert ended.code == 1
        assert "spark-1 at 127.0.0.1 ended the connection" in ended.err
    assert not any(each.names for each in site.workers)
    end(head)
    site.outside.rate = 0
    assert site.run()[0].code == 0
    assert site.has_it()
    assert any(asked for _, _, asked, _ in site.outside.requests), "it began again from nothing"


def test_receiver_killed_in_the_middle(site: Site) -> None:
    site.add()
    site.outside.rate = 2_000_000
    head = site.serve()
    workers = [site.receive(n) for n in range(2)]
    wait_for(lambda: list(site.cache.glob("*.part")))
    workers[0].kill()
    found = end(head)
    assert found.code == 0
    assert found.result["receivers"]["spark-2"] == {
        "state": "failed",
        "reason": "its connection ended or went silent",
    }
    assert (end(workers[1]).code, site.workers[0].names) == (0, {})
    end(workers[0])
    assert site.run()[1][0].code == 0
    assert site.has_it()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_order(site: Site, number: int) -> None:
    site.outside.rate = 500_000
    head = site.serve()
    worker = site.receive(0)
    wait_for((site.workers[0].home / "layers").exists)
    worker.send_signal(number)
    ended = end(worker)
    assert (ended.code, ended.err) == (1, f"stopped by signal {int(number)}\n")
    head.send_signal(number)
    assert end(head).code == 1
    assert site.is_clean()
    assert not site.workers[0].names


def test_it_ends_when_nobody_reads_any_more(site: Site) -> None:
    site.outside.rate = 100_000
    head = site.serve(patience=60)
    worker = site.receive(0, patience=60)
    wait_for((site.workers[0].home / "layers").exists)
    for each in (head, worker):
        assert each.stdout is not None
        each.stdout.close()
        each.stdout = None
    for each in (head, worker):
        assert each.wait(8) == 1
        each.communicate()
    assert site.is_clean()


def test_receivers_that_never_come(site: Site) -> None:
    head = end(site.serve(patience=1))
    assert head.code == 0
    assert {each["state"] for each in head.result["receivers"].values()} == {"absent"}
    assert site.has_it(site.head)
    assert site.is_clean()


def test_a_byte_that_changes_on_the_way_is_refused(site: Site) -> None:
    site.add()
    proxy = Proxy(site.ports[0])
    flip(proxy, 2 * MIB)
    head = site.serve()
    spoiled, other = site.receive(0, ports=[proxy.port]), site.receive(1)
    ended = end(spoiled)
    assert ended.code == 1
    assert "what arrived is not what was sent" in ended.err
    assert (end(other).code, end(head).code) == (0, 0)
    proxy.close()
    assert not site.workers[0].names
    site.run()
    assert site.has_it()


def test_a_full_disk_on_a_worker(site: Site) -> None:
    site.add()
    (site.workers[0].home / "full").touch()
    head, workers = site.run()
    assert [head.code, workers[0].code, workers[1].code] == [0, 1, 0]
    assert "the disk of this host's Docker became full" in workers[0].err
    assert "disk" in head.result["receivers"]["spark-2"]["reason"]
    assert not site.workers[0].names
    (site.workers[0].home / "full").unlink()
    site.run()
    assert site.has_it()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")
def test_a_full_disk_on_the_head(site: Site) -> None:
    site.cache.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(site.cache)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount here")
    try:
        head, workers = site.run()
        left = list(site.cache.glob("*.part"))
    finally:
        subprocess.run(["umount", str(site.cache)], check=True)
    assert {each.code for each in (head, *workers)} == {1}
    assert f"the head's disk is full at {site.cache}" in head.err
    assert "the head's disk is full" in workers[0].err
    assert not left, "it stays full"


def test_without_the_token_nobody_gets_anything(site: Site) -> None:
    site.add()
    head = site.serve(patience=4)
    wait_for(lambda: not site.is_clean())
    stranger = end(site.receive(0, secrets={"token": "fff000"}, patience=1))
    assert stranger.code == 1
    assert "what listens there does not let us in" in stranger.err
    peer = http.client.HTTPConnection(HEAD, site.ports[0], timeout=6)
    peer.request("GET", f"/v2/acme/vllm/manifests/{site.image.digest}")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        peer.getresponse()
    with socket.create_connection((HEAD, site.ports[0]), 6, ("127.0.0.2", 0)) as liar:
        liar.recv(100)
        liar.sendall(bytes(wire.NONCE + 4 + wire.PROOF))
        with contextlib.suppress(ConnectionError):
            assert liar.recv(100) == b""
    right = end(site.receive(1))
    assert right.code == 0
    assert end(head).code == 0
    assert site.has_it(site.head, site.workers[1])


def test_a_program_without_token_does_nothing(site: Site) -> None:
    site.secrets = {}
    ended = end(site.receive(0))
    assert (ended.code, ended.err) == (
        1,
        "this program was started without a token: see cluster/programs.py\n",
    )


def test_encrypted_docker_gets_it_and_nobody_else_can_read_it(site: Site) -> None:
    site.add()
    encrypted = {**SECRETS, "certificate": certificate().get_secret_value()}
    heard = {False: bytearray(), True: bytearray()}
    for is_encrypted in (False, True):
        site.secrets = encrypted if is_encrypted else dict(SECRETS)
        proxy = Proxy(site.ports[0])
        proxy.overhear = heard[is_encrypted].extend
        head, worker, other = site.serve(), site.receive(0, ports=[proxy.port]), site.receive(1)
        ended = [end(each) for each in (worker, other, head)]
        proxy.close()
        assert [(each.code, each.err) for each in ended] == [(0, "")] * 3
        assert site.has_it()
        for each in site.machines:
            shutil.rmtree(each.home / "layers", ignore_errors=True)
            (each.home / "names.json").unlink()
    name = site.image.digest.encode()
    assert name in heard[False]
    assert len(heard[True]) > 3 * MIB
    assert name not in heard[True]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_other_users_of_a_host_get_nothing_from_its_port() -> None:
    with socket.create_server((HEAD, 0)) as server:
        place = server.getsockname()
        program = "import os, socket, sys; os.setuid(int(sys.argv[1])); peer = socket.socket()"
        program += f"; peer.connect({place}); peer.recv(1)"
        with contextlib.ExitStack() as stack:
            for user, is_welcome in (("0", True), ("65534", False)):
                argv = [sys.executable, "-c", program, user]
                process = stack.enter_context(subprocess.Popen(argv))
                peer, _ = server.accept()
                with peer:
                    assert loopback.may_use(peer) is is_welcome
                assert process.wait(5) == 0


def test_taken_ports_and_absent_addresses(site: Site) -> None:
    with socket.create_server((HEAD, site.ports[0])):
        ended = end(site.serve())
        assert f"on 127.0.0.1 every port of {site.ports} is taken" in ended.err
        site.ports.append(free_port())
        assert site.run()[0].code == 0
    assert "this host has no address 203.0.113.9" in end(site.serve(address="203.0.113.9")).err
    ended = end(site.receive(0, source="203.0.113.9"))
    assert "this host has no address 203.0.113.9" in ended.err
    ended = end(site.receive(0, patience=0))
    assert "cannot reach the sender spark-1 at 127.0.0.1 from 127.0.0.2" in ended.err


def test_two_clusters_at_the_same_time(site: Site) -> None:
    (site.folder / "second").mkdir()
    other = Site(
        site.folder / "second", site.path, site.outside, site.image, secrets={"token": "fff"}
    )
    wanted = {**other.common(role="serve", receivers=[]), "cache": str(site.cache)}
    heads = [site.serve(), other.head.start(wanted, other.secrets)]
    assert [end(each).code for each in (site.receive(), *heads)] == [0, 0, 0]
    assert site.has_it()
    assert other.has_it(other.head)


def pack_zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-q"], input=data, stdout=subprocess.PIPE, check=True).stdout


@pytest.mark.parametrize(
    ("pack", "is_new"),
    [
        (bytes, False),
        (bytes, True),
        (gzip.compress, False),
        (lzma.compress, True),
        (pack_zstd, True),
    ],
    ids=["docker 24", "docker 25", "gz", "xz", "zst"],
)
def test_an_archive(site: Site, is_new: bool, pack: Callable[[bytes], bytes]) -> None:
    if pack is pack_zstd and not shutil.which("zstd"):
        pytest.skip("no zstd")
    archive = site.folder / "an image.tar"
    archive.write_bytes(pack(site.image.saved([TAG], is_new)))
    keys = {"archive": str(archive), "image": TAG}
    found = site.resolve(**keys)
    assert found.code == 0, found.err
    digest = found.result["digest"]

    head, workers = site.run(digest=digest, **keys)

    assert {each.err for each in (head, *workers)} == {""}
    assert site.has_it()  # the same id as docker load would give
    assert not site.outside.requests
    assert archive.exists()
    assert not site.cache.exists()


def test_archives_that_are_no_good(site: Site) -> None:
    archive = site.folder / "a.tar"
    keys = {"archive": str(archive), "image": TAG}
    assert "cannot read the archive" in site.resolve(**keys).err
    whole = site.image.saved(["acme/other:1", "acme/other:2"])
    archive.write_bytes(whole)
    assert "it has acme/other:1, acme/other:2: set image" in site.resolve(**keys).err
    archive.write_bytes(whole[: len(whole) // 2])
    assert "is no complete `docker save` archive" in site.resolve(**keys).err
    archive.write_bytes(gzip.compress(whole)[:-9])
    assert "cannot be unpacked: gzip: " in site.resolve(**keys).err
    archive.write_bytes(site.image.saved(None))
    assert site.resolve(**keys).code == 0
    archive.write_bytes(whole)
    keys["image"] = "acme/other@" + site.image.digest
    assert site.resolve(**keys).code == 0


def test_an_archive_that_lies_is_refused(site: Site) -> None:
    lying = Image.make(400_000, 3 * MIB, 10)
    lying.layers[1] = lying.layers[1][:-2000] + bytes(2000)
    other = bytearray(lying.layers[1])
    other[2 * MIB] ^= 1
    lying.layers[1] = bytes(other)
    archive = site.folder / "a.tar"
    archive.write_bytes(lying.saved([TAG]))
    keys = {"archive": str(archive), "image": TAG}
    head, workers = site.run(digest=site.resolve(**keys).result["digest"], **keys)
    assert {each.code for each in (head, *workers)} == {1}
    assert "verification failed" in head.err
    assert not any(each.names for each in site.machines)


def test_an_image_that_only_the_heads_docker_has(site: Site) -> None:
    (site.head.home / "saved.tar").write_bytes(site.image.saved(["acme/built:here"]))
    (site.head.home / "names.json").write_text(json.dumps({"acme/built:here": site.image.id}))
    keys = {"local": True, "image": "acme/built:here"}
    found = site.resolve(**keys)
    assert found.code == 0, found.err
    head, workers = site.run(digest=found.result["digest"], tag="acme/built:here", **keys)
    assert {each.err for each in (head, *workers)} == {""}
    assert all(each.names == {"acme/built:here": site.image.id} for each in site.machines)
    assert "No such image" in site.resolve(local=True, image="acme/none:1").err


def test_progress(site: Site) -> None:
    site.outside.rate = 1_000_000
    _, workers = site.run()
    lines = [line for line in workers[0].out.splitlines() if line.startswith("image: ")]
    assert 1 <= len(lines) <= 3
    assert lines[0].split(",")[0] in ("image: 0.00 of 0.00 GB",)
    assert "GB/s" in lines[0] and "s left" in lines[0]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("vllm/vllm-openai:v0.12.0", ("docker.io", "vllm/vllm-openai", "v0.12.0")),
        ("ubuntu", ("docker.io", "library/ubuntu", "latest")),
        ("docker.io/ubuntu:24.04", ("docker.io", "library/ubuntu", "24.04")),
        ("registry.lab:5000/vllm-cpu:lab", ("registry.lab:5000", "vllm-cpu", "lab")),
        ("localhost/a/b/c", ("localhost", "a/b/c", "latest")),
        ("quay.example/a/b:t@sha256:00", ("quay.example", "a/b", "sha256:00")),
    ],
)
def test_references_are_read_as_docker_does(name: str, parts: tuple[str, str, str]) -> None:
    assert tuple(Reference.parse(name)) == parts


def test_mirrors_of_docker_hub_come_first() -> None:
    found = upstream.bases("docker.io", {"Mirrors": ["https://mirror.example/"]})
    assert found == ["https://mirror.example", "https://registry-1.docker.io"]
    assert upstream.bases("quay.example", {"Mirrors": ["https://mirror.example/"]}) == [
        "https://quay.example"
    ]


def test_head_that_asks_for_anything_else_gets_nothing(site: Site) -> None:
    """The head's login is for this image, not for whatever a receiver asks for."""
    source = Source(Reference.parse(TAG), "")
    source.learn(site.image.manifest, "m")
    assert source.manifest(sha(b"other")) is None
    assert source.blob(sha(b"other")) is None
