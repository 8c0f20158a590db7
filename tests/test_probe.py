"""remote/probe.py against hosts written as folders, and against everything odd in them."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cluster.probe import Probe
from tests import trees
from tests.trees import build, build_node, probe_tree, run_probe, spark, wanted


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """pytest's, but gone after the test."""
    yield tmp_path
    trees.remove(tmp_path)


def rows(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By name."""
    return {row["name"]: row for row in found}


@pytest.mark.parametrize("scenario", trees.SCENARIOS)
def test_every_host_of_every_scenario_is_read(scenario: str, tmp_path: Path) -> None:
    nodes = trees.SCENARIOS[scenario]()
    for name, root in build(tmp_path, nodes).items():
        found = probe_tree(root)
        probe = Probe.model_validate(found)
        node = nodes[name]
        assert probe.hostname == node.hostname
        assert probe.hostname_addresses == ["127.0.1.1"]
        assert {each.name: tuple(each.addresses) for each in probe.interfaces} == {
            nic.name: nic.addresses for nic in node.nics
        }
        assert {each.name: (each.mtu, each.carrier) for each in probe.interfaces} == {
            nic.name: (nic.mtu, nic.up) for nic in node.nics
        }
        assert {each.name: each.interfaces for each in probe.hcas} == {
            nic.hca: [nic.name] for nic in node.nics if nic.hca
        }
        assert len(probe.gpus) == node.gpus
        assert probe.infiniband_devices == bool(probe.hcas)
        assert probe.docker.error is None
        assert found["default_routes"] == ([node.default_route] if node.default_route else [])


def test_a_spark(tmp_path: Path) -> None:
    found = probe_tree(build(tmp_path, trees.direct())["spark-1"])
    interfaces = rows(found["interfaces"])
    assert {name: row["kind"] for name, row in interfaces.items()} == {
        "lo": "loopback",
        "enp1s0f0np0": "physical",
        "enP2p1s0f0np0": "physical",
        "enp1s0f1np1": "physical",
        "enP2p1s0f1np1": "physical",
        "enP7s7": "physical",
        "wlP9s9": "wireless",
        "docker0": "bridge",
    }
    assert interfaces["enP2p1s0f1np1"] == {
        "name": "enP2p1s0f1np1",
        "kind": "physical",
        "mac": "4c:bb:47:00:00:04",
        "mtu": 9000,
        "carrier": True,
        "speed_mbps": 100_000,
        "driver": "mlx5_core",
        "device": "0002:01:00.1",
        "addresses": ["192.168.201.12/24"],
    }
    assert interfaces["enp1s0f0np0"]["speed_mbps"] is None
    hcas = rows(found["hcas"])
    assert {name: row["state"] for name, row in hcas.items()} == {
        "rocep1s0f0": "DOWN",
        "roceP2p1s0f0": "DOWN",
        "rocep1s0f1": "ACTIVE",
        "roceP2p1s0f1": "ACTIVE",
    }
    assert [(gid["index"], gid["ipv4"], gid["type"]) for gid in hcas["rocep1s0f1"]["gids"]] == [
        (0, None, "IB/RoCE v1"),
        (1, None, "RoCE v2"),
        (2, "192.168.200.12", "IB/RoCE v1"),
        (3, "192.168.200.12", "RoCE v2"),
    ]
    assert found["gpus"] == [
        {"index": 0, "name": "NVIDIA GB10", "driver": "580.95.05", "memory_bytes": None}
    ]
    assert found["memory"]["MemAvailable"] == 118_000_000 * 1024


def test_gid_drift_shows(tmp_path: Path) -> None:
    indexes = {
        name: [
            hca.roce_v2[0].index
            for hca in Probe.model_validate(probe_tree(root)).hcas
            if hca.name == "rocep1s0f1"
        ]
        for name, root in build(tmp_path, trees.gid_drift()).items()
    }
    assert indexes == {"spark-1": [3], "spark-2": [4]}


@pytest.mark.parametrize(
    ("nic_kind", "kind"),
    [
        ("tun", "vpn"),
        ("wireguard", "vpn"),
        ("bond", "bond"),
        ("vlan", "vlan"),
        ("virtual", "virtual"),
    ],
)
def test_kinds_that_have_no_device(nic_kind: str, kind: str, tmp_path: Path) -> None:
    nic = trees.Nic("x0", ("10.9.0.1/24",), kind=nic_kind)
    found = probe_tree(build_node(tmp_path / "host", trees.Node("h", (nic,))))
    assert rows(found["interfaces"])["x0"]["kind"] == kind


@pytest.mark.parametrize("missing", ["ip", "nvidia-smi", "docker"])
def test_a_missing_command_is_named(missing: str, tmp_path: Path) -> None:
    node = spark(1, {1: trees.TWO_SUBNETS})
    commands = tuple(each for each in node.commands if each != missing)
    found = probe_tree(build_node(tmp_path / "host", node.but(commands=commands)))
    complaints = {
        "ip": found["ip_error"],
        "nvidia-smi": found["gpu_error"],
        "docker": found["docker"]["error"],
    }
    assert complaints.pop(missing) == f"{missing}: not found"
    assert not any(complaints.values())


def test_an_empty_host(tmp_path: Path) -> None:
    found = probe_tree(tmp_path)
    assert found["interfaces"] == found["hcas"] == found["gpus"] == []
    Probe.model_validate(found)


GARBAGE: list[tuple[str, bytes]] = [
    *(
        (f"commands/{name}", b"\xff\xfe\x00garbage, \n,,,\n 1 2 3 inet\n")
        for name in ("ip", "docker")
    ),
    ("commands/nvidia-smi", b"NVIDIA-SMI has failed because it couldn't communicate\n, , , \n"),
    *(("commands/docker", text) for text in (b"[]", b"null", b"3", b'"x"', b"{}", b"\n \n")),
    ("commands/docker", b'{"ServerErrors": "down", "Runtimes": 3, "DockerRootDir": 7}'),
    ("commands/docker", b'{"ServerErrors": [null], "Runtimes": [1]}'),
    ("proc/net/route", b"Iface\nenp1 00000000 x y z w metric 00000000 1 2\n\xff\xfe\n"),
    ("proc/meminfo", b"\xff\nMemTotal: much kB\nMemFree:\n:::\n"),
    ("proc/meminfo", "MemTotal: ²٣ kB".encode()),
    ("etc/hosts", b"\xff\xfe spark-1\n\n# spark-1\nspark-1\n"),
    ("proc/sys/kernel/hostname", b"caf\xe9\n"),
    ("proc/sys/kernel/hostname", b""),
    ("sys/class/net/enp1s0f1np1/mtu", b"lots\n"),
    ("sys/class/net/enp1s0f1np1/speed", b"\xff\n"),
    ("sys/class/net/enp1s0f1np1/address", b"\xff\xff\n"),
    ("sys/class/infiniband/rocep1s0f1/ports/1/state", b"ACTIVE\n"),
    ("sys/class/infiniband/rocep1s0f1/ports/one/state", b"4: ACTIVE\n"),
    ("sys/class/infiniband/rocep1s0f1/ports/1/gids/x", b"fe80::1\n"),
    ("sys/class/infiniband/rocep1s0f1/ports/1/gids/5", b"0000:0000:0000:0000:0000:ffff:zz:1\n"),
    ("sys/class/infiniband/rocep1s0f1/ports/1/gids/5", b"0000:0000:0000:0000:0000:ffff::\n"),
    ("sys/class/infiniband/rocep1s0f1/ports/1/gids/6", b"\xff\n"),
    ("sys/class/infiniband/rocep1s0f1/ports/1/gid_attrs/ndevs/3", b"\xff\n"),
    ("sys/class/infiniband/abi_version", b"6\n"),
]


@pytest.mark.parametrize(("path", "content"), GARBAGE)
def test_garbage_is_no_traceback(path: str, content: bytes, tmp_path: Path) -> None:
    root = build_node(tmp_path / "host", trees.direct()["spark-1"])
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(content)
    probe = Probe.model_validate(probe_tree(root))
    assert len(probe.interfaces) == 8
    assert {hca.name for hca in probe.hcas} >= {"roceP2p1s0f1", "rocep1s0f0", "roceP2p1s0f0"}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A directory in a file's place answers with an error even to root."""
    root = build_node(tmp_path / "host", trees.direct()["spark-1"])
    for path in ("proc/meminfo", "proc/net/route", "etc/hosts", "commands/ip", "commands/docker"):
        (root / path).unlink()
        (root / path).mkdir()
    Probe.model_validate(probe_tree(root))


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    root = build_node(tmp_path / "host", trees.direct()["spark-1"])
    for folder in ("sys/class/net/caf\udce9", "sys/class/infiniband/caf\udce9/ports/1"):
        (root / folder).mkdir(parents=True)
        for name in ("mtu", "state"):
            (root / folder / name).write_text("1500\n", encoding="utf-8")
    found = probe_tree(root)
    json.dumps(found, ensure_ascii=False).encode()  # as a report would print it
    assert len(Probe.model_validate(found).interfaces) == 9


def test_a_root_with_special_characters(tmp_path: Path) -> None:
    root = build_node(tmp_path / "[a]*?", spark(1, {1: trees.TWO_SUBNETS}))
    assert len(probe_tree(root)["interfaces"]) == 8


@pytest.mark.slow
def test_two_thousand_interfaces(tmp_path: Path) -> None:
    nics = tuple(
        trees.Nic(f"veth{n}", (f"10.{n // 250}.{n % 250}.1/24",), kind="virtual")
        for n in range(2000)
    )
    root = build_node(tmp_path / "host", trees.Node("h", nics))
    began = time.monotonic()
    found = probe_tree(root)
    assert time.monotonic() - began < 20
    assert len(found["interfaces"]) == 2000


LOCALES: dict[str, dict[str, str]] = {
    "C": {"LC_ALL": "C"},
    "POSIX without UTF-8": {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    "unknown": {"LC_ALL": "xx_XX.KOI8-Q"},
    "Turkish": {"LC_ALL": "tr_TR.UTF-8", "LANGUAGE": "tr"},
    "ASCII stdout": {"PYTHONIOENCODING": "ascii:strict"},
    "nothing at all": {},
}


@pytest.mark.parametrize("locale", LOCALES)
def test_locales(locale: str, tmp_path: Path) -> None:
    root = build_node(tmp_path / "host", trees.direct()["spark-1"])
    (root / "proc/sys/kernel/hostname").write_text("spark-ü\n", encoding="utf-8")
    done = run_probe(wanted(root), {"PATH": os.environ["PATH"], **LOCALES[locale]})
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["hostname"] == "spark-ü"


@pytest.mark.parametrize("locale", LOCALES)
def test_this_machine_in_every_locale(locale: str) -> None:
    argument = wanted("/", model="/srv/models", ports=[22], containers=["none"])
    done = run_probe(argument, {"PATH": os.environ["PATH"], **LOCALES[locale]})
    assert (done.returncode, done.stderr) == (0, b"")
    Probe.model_validate(json.loads(done.stdout))


def executable(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        "echo garbage",
        "printf '\\377\\376\\n'",
        "echo '[{}]'",
        "echo '[1, null]'",
        "echo '{}'",
        "echo null",
        'echo \'[{"Name": null, "Id": 3, "Config": null, "State": []}]\'',
        "kill -9 $$",
    ],
)
def test_commands_that_say_nonsense_on_a_real_host(script: str, tmp_path: Path) -> None:
    for name in ("ip", "nvidia-smi", "docker"):
        executable(tmp_path / "bin", name, script)
    done = run_probe(
        wanted("/", containers=["vllm-ray"]), {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    )
    assert (done.returncode, done.stderr) == (0, b"")
    found = json.loads(done.stdout)
    assert found["containers"] == []
    assert found["docker"]["error"] or script == "echo '{}'"
    Probe.model_validate(found)


def test_no_command_at_all_on_a_real_host(tmp_path: Path) -> None:
    done = run_probe(wanted("/", containers=["vllm-ray"]), {"PATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, b"")
    found = json.loads(done.stdout)
    assert found["ip_error"] == "ip: not found"
    assert found["gpu_error"] == "nvidia-smi: not found"
    assert found["docker"]["error"] == "docker: not found"


@pytest.mark.parametrize("model", ["relative/path", "", "/", "/no/such/model", "/\udcff"])
def test_a_model_path_of_any_kind(model: str) -> None:
    done = run_probe(wanted("/", model=model))
    assert (done.returncode, done.stderr) == (0, b"")


def free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def meet(address: str, peers: dict[str, str], ports: list[int], **more: Any) -> dict[str, Any]:
    return {
        "address": address,
        "peers": peers,
        "ports": ports,
        "udp": ports[0],
        "deadline": 1,
        **more,
    }


@pytest.mark.parametrize("frame", [None, 0, 10, 29, 1500, 65536, 10**6])
def test_any_frame_size(frame: int | None) -> None:
    peers = {"other": "127.0.0.9"}
    done = run_probe(
        wanted("/", meet=meet("127.0.0.1", peers, free_ports(1), frame=frame, deadline=0.2))
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["meeting"]["frames"] == ({"other": False} if frame else {})


def test_three_hosts_meet_on_several_networks_at_once() -> None:
    """Host 3 has a firewall: it takes no part on the second network."""
    ports = free_ports(2)
    networks = {"a": "127.0.1.{}", "b": "127.0.2.{}"}

    def host(number: int) -> dict[str, Any]:
        meetings = {
            key: meet(
                pattern.format(number),
                {f"h{n}": pattern.format(n) for n in (1, 2, 3) if n != number},
                ports,
                frame=1500,
            )
            for key, pattern in networks.items()
            if (key, number) != ("b", 3)
        }
        done = run_probe({"meetings": meetings})
        assert (done.returncode, done.stderr) == (0, b"")
        found: dict[str, Any] = json.loads(done.stdout)["meetings"]
        return found

    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(host, (1, 2, 3))
    for each in (first, second, third):
        assert each["a"]["failures"] == each["a"]["unseen"] == []
        assert all(each["a"]["frames"].values())
    assert {failure["peer"] for failure in first["b"]["failures"]} == {"h3"}
    assert {row["peer"] for row in first["b"]["unseen"]} == {"h3"}
    assert first["b"]["frames"] == {"h2": True, "h3": False}
    assert "b" not in third
