"""What tests/gpu does offline: it renders its plan, packs, refuses, and reads recorded logs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster import commands
from cluster.environment import node_environment
from cluster.proof import argument
from cluster.remote.wait_unit import Progress
from cluster.tables import log_patterns, table
from tests.gpu import GpuTestError, __main__, cases, container, nodes, pack, plan, run
from tests.gpu.cases import Case

ROOT = Path(__file__).parent.parent
LOGS = Path(__file__).parent / "logs"
CASES = {case.name: case for case in cases.ALL}


@pytest.fixture(scope="module")
def rendered() -> dict[str, Any]:
    """The plan, as the GPU machine reads it."""
    made: dict[str, Any] = json.loads(json.dumps(plan.plan()))
    return made


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_plan_is_what_a_deploy_would_run(case: Case, rendered: dict[str, Any]) -> None:
    cluster = cases.cluster(case)
    found = rendered["cases"][case.name]
    assert list(found["nodes"]) == cluster.nodes
    for name, node in found["nodes"].items():
        text = node["files"][commands.node_env_path(cluster)]
        expected = {each.name: each.value for each in node_environment(cluster, name)}
        assert container.environment(text) == expected
        if "serve" in node["runs"]:
            serve = commands.serve_container(cluster, name, rendered["image"])
            assert node["runs"]["serve"] == serve
        wanted = json.loads(node["prove"][-1])
        assert wanted == argument(cluster, cluster.nodes, name, wanted["port"])
        assert node["prove"][:2] == ["-", "prove"]
    ports = {json.loads(node["prove"][-1])["port"] for node in found["nodes"].values()}
    assert len(ports) == 1


def test_the_cases_are_proven_at_ports_of_their_own(rendered: dict[str, Any]) -> None:
    ports = {
        json.loads(node["prove"][-1])["port"]
        for case in rendered["cases"].values()
        for node in case["nodes"].values()
    }
    assert len(ports) == len(rendered["cases"])


def test_a_flag_of_ray_can_get_lost(rendered: dict[str, Any]) -> None:
    lost, good = (
        rendered["cases"][name]["nodes"]["spark-1"]["runs"]["ray"]
        for name in ("ray-without-address", "ray-good")
    )
    assert set(good) - set(lost) == {"--node-ip-address=192.168.200.12"}


def test_docker_run_is_read_as_docker_does(rendered: dict[str, Any]) -> None:
    runs = rendered["cases"]["serve-ray"]["nodes"]["spark-1"]["runs"]
    ray, serve = (container.read(runs[name], rendered["image"]) for name in ("ray", "serve"))
    assert ray.argv[:4] == ["ray", "start", "--block", "--head"]
    assert serve.argv[:3] == ["vllm", "serve", "/srv/models/tiny"]
    assert (ray.shm_size, serve.shm_size) == ("16g", None)
    assert ("vllm-tmp", "/tmp") in ray.volumes
    assert ("vllm-tmp", "/tmp") in serve.volumes
    assert ray.env_files == serve.env_files == ["/etc/vllm/node.env"]
    assert ray.ulimits == {"memlock": -1, "stack": 67108864}


def test_an_env_file_is_read_as_docker_does() -> None:
    text = "# a comment\n\nA=1\nB= x y = z \nC=\n"
    assert container.environment(text) == {"A": "1", "B": " x y = z ", "C": ""}


def test_a_null_in_a_case_removes_what_is_there() -> None:
    alone = cases.cluster(CASES["moe-one-graphs"])
    assert alone.nodes == ["spark-1"]
    assert "enforce-eager" not in alone.serve.flags
    assert alone.serve.flags["load-format"] == "dummy"
    assert cases.cluster(CASES["nccl-unset"]).env["NCCL_SOCKET_IFNAME"] is None


def test_a_case_that_is_no_cluster_file_is_refused() -> None:
    broken = Case("broken", "hosts: {spark-2: {fabric: {address: 10.0.0.1}}}")
    with pytest.raises(GpuTestError, match=r"case broken: hosts\.spark-2\.fabric\.address"):
        cases.cluster(broken)


# The image's part


def test_what_decides_the_outcome_comes_from_the_env_file_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "VLLM_HOST_IP", "RAY_ADDRESS", "PYTHONPATH", "HF_HOME"):
        monkeypatch.setenv(name, "of this machine")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/driver")
    node = nodes.Node("spark-1", 0, "192.168.200.12/24", 1, tmp_path)
    found = node.environment([Path("/site")], {"VLLM_HOST_IP": "192.168.200.12"})
    assert "of this machine" not in found.values()
    assert found["VLLM_HOST_IP"] == "192.168.200.12"
    assert (found["NCCL_NVLS_ENABLE"], found["LD_LIBRARY_PATH"]) == ("0", "/driver")
    assert (found["PYTHONPATH"], found["CUDA_VISIBLE_DEVICES"]) == ("/site", "1")
    assert found["PATH"].startswith("/site/bin:")


def test_each_node_has_a_gpu_of_its_own_where_there_are_two(
    rendered: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "Ip", lambda work: None)
    for cards, expected in ((0, [0, 0]), (1, [0, 0]), (2, [0, 1]), (8, [0, 1])):
        runner = run.Runner(rendered, tmp_path, [], tmp_path / "out", cards)
        assert [node.gpu for node in runner.nodes] == expected


def test_a_nodes_files_are_its_own_and_models_are_the_machines(tmp_path: Path) -> None:
    node = nodes.Node("spark-1", 0, "192.168.200.12/24", 0, tmp_path)
    assert node.host_path("/etc/vllm/node.env") == tmp_path / "spark-1/host/etc/vllm/node.env"
    assert node.host_path("/srv/models/tiny") == Path("/srv/models/tiny")


# pack


def test_what_is_packed_is_what_the_plan_says() -> None:
    assert plan.IMAGE.versions.vllm == "0.26.0"
    assert plan.IMAGE.versions.ray == "2.56.1"
    lines = pack.PACKAGES.read_text(encoding="utf-8").split()
    assert all(line.count("==") == 1 for line in lines)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", True),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", False),
        ("vllm/_moe_C_stable_libtorch.abi3.so", False),
        ("ray/rllib/algorithms/algorithm.py", True),
        ("ray/_raylet.so", False),
        ("zmq/tests/test_socket.py", True),
        ("vllm-0.26.0.dist-info/METADATA", False),
    ],
)
def test_what_is_never_loaded_is_left_out(name: str, left_out: bool) -> None:
    assert bool(pack.LEFT_OUT.search(name)) is left_out


@pytest.mark.skipif(shutil.which("xz") is None, reason="no xz here")
def test_pieces_make_the_archive_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "PIECE_BYTES", 100)
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(os.urandom(1000))
    archive = tmp_path / "site.tar.xz"
    subprocess.run(["tar", "-cJf", archive, "-C", source, "file"], check=True)
    pieces = pack._cut(archive, tmp_path / "pieces")
    assert len(pieces) > 10  # so that 10 comes after 9, not after 1
    run.unpack(tmp_path / "pieces", tmp_path / "work")
    assert (tmp_path / "work/file").read_bytes() == (source / "file").read_bytes()

    pieces[0].unlink()
    with pytest.raises(GpuTestError, match="is one missing"):
        run.unpack(tmp_path / "pieces", tmp_path / "other")


def test_no_pieces_are_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(GpuTestError, match=r"no pieces in .*: run `python -m tests.gpu pack`"):
        run.unpack(tmp_path, tmp_path / "work")


# The command line


@pytest.mark.parametrize("command", ["check", "run"])
def test_without_a_gpu_it_refuses_with_a_sentence(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nodes, "gpus", lambda: [])
    monkeypatch.setattr(sys, "argv", ["gpu", command])
    assert __main__.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("error: no NVIDIA GPU on this machine (nvidia-smi lists none).")
    assert "`make gpu-test` needs Linux with an NVIDIA GPU" in said


def test_the_gpu_machine_needs_the_standard_library_only() -> None:
    code = "import tests.gpu.__main__, tests.gpu.run, tests.gpu.nodes, tests.gpu.container"
    argv = [sys.executable, "-S", "-c", code]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_groups_and_cases_can_be_chosen(rendered: dict[str, Any]) -> None:
    assert __main__._chosen([], rendered) == list(CASES)
    assert __main__._chosen(["prove-ray", "good"], rendered)[-1] == "good"
    assert "moe-mp" in __main__._chosen(["serve"], rendered)
    with pytest.raises(GpuTestError, match="no such case: prov;"):
        __main__._chosen(["prov"], rendered)


# What was recorded


def test_two_ranks_answered_what_one_rank_answers() -> None:
    results = json.loads((LOGS / "gpu" / "results.json").read_text(encoding="utf-8"))
    assert set(run.differences(results)) == {"serve-ray", "serve-mp"}
    completions = {results[name]["completion"]["text"] for name in CASES if "serve-" in name}
    assert len(completions) == 1

    results["serve-mp"]["tokens"]["tokens"][3] = "other"
    with pytest.raises(GpuTestError, match="serve-mp answers"):
        run.differences(results)


@pytest.mark.parametrize(
    ("log", "key", "expected"),
    [
        (
            "serve-mp-cuda-0.26",
            "serve",
            [
                "vLLM 0.26.0",
                "engine starts",
                "message queues at 192.168.200.12",
                "rendezvous at 192.168.200.12:29501",
                "NCCL 2.28.9 connects",
                "message queues connect",
                "ranks are connected",
                "weights load",
                "weights 0 of 1",
                "weights 1 of 1, about 00:00 left",
                "weights loaded in 0.01 s",
                "model loaded, 0.0 GiB on the GPU",
                "KV cache of 524,288 tokens",
                "engine ready after 3.64 s",
                "listens",
            ],
        ),
        (
            "serve-graphs-cuda-0.26",
            "serve",
            [
                "vLLM 0.26.0",
                "engine starts",
                "rendezvous at 192.168.200.12:57317",
                "ranks are connected",
                "weights load",
                "model loaded, 5.82 GiB on the GPU",
                "compiled in 22.61 s",
                "KV cache of 262,144 tokens",
                "CUDA graphs are captured",
                "engine ready after 27.69 s",
                "listens",
            ],
        ),
        (
            "headless-cuda-0.26",
            "headless",
            ["vLLM starts without an API, rendezvous at 192.168.200.12:29501"],
        ),
        ("ray-2.56", "ray", ["Ray starts, node address 192.168.200.12"]),
    ],
)
def test_the_phases_of_a_start_on_gpus(log: str, key: str, expected: list[str]) -> None:
    said, ready = _phases(log, key)
    assert said == expected
    assert ready


def test_the_phases_of_a_start_on_gpus_with_ray() -> None:
    """Ray forwards the lines of the other node late, so some phases come twice."""
    said, ready = _phases("serve-ray-cuda-0.26", "serve")
    assert ready
    assert list(dict.fromkeys(said)) == [
        "vLLM 0.26.0",
        "engine starts",
        "rendezvous at 192.168.200.12:100",  # run as root; preflight meets the hosts there
        "NCCL 2.28.9 connects",
        "message queues connect",
        "ranks are connected",
        "weights load",
        "weights loaded in 0.01 s",
        "weights 0 of 1",
        "weights 1 of 1, about 00:00 left",
        "model loaded, 0.0 GiB on the GPU",
        "KV cache of 524,288 tokens",
        "engine ready after 22.85 s",
        "listens",
    ]


def _phases(log: str, key: str) -> tuple[list[str], bool]:
    progress = Progress({**table("phases")[key], **log_patterns()})
    lines = (LOGS / f"{log}.log").read_text(encoding="utf-8").splitlines()
    return [news for line in lines if (news := progress.feed(line))], progress.ready
