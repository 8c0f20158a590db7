"""Wrong cluster files: one clear message each, with file, line and key, and no connection made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.load import ClusterFileError, load
from cluster.settings import Cluster

ROOT = Path(__file__).parent.parent
GOOD = (ROOT / "tests" / "clusters" / "two-hosts.yaml").read_text(encoding="utf-8")


def good(old: str = "", new: str = "", *, more: str = "") -> str:
    """The good file with one thing changed."""
    assert old in GOOD
    return GOOD.replace(old, new, 1) + more


# name: (content, line or None, what the message has to say)
WRONG: dict[str, tuple[str | bytes, int | None, list[str]]] = {
    "unknown key at the top": (good("image:", "imgae:"), 2, ["imgae", 'Did you mean "image"?']),
    "unknown key of a host": (
        good("    role: head", "    roll: head"),
        6,
        ["hosts.spark-1.roll", 'Did you mean "role"?'],
    ),
    "unknown key of a fabric": (
        good("interface: enp1s0f1np1}\n  spark-2", "interfaces: x}\n  spark-2"),
        7,
        ["hosts.spark-1.fabric.interfaces", '"interface"'],
    ),
    "unknown role": (good("role: head", "role: master"), 6, ["hosts.spark-1.role", "'head'"]),
    "an archive of the model that is not named": (
        good("model: Qwen/Qwen2.5-7B-Instruct", "model: {name: /srv/m, source: archive}"),
        3,
        ["model.archive", "model.source: archive and model.archive belong together"],
    ),
    "an archive of the model that is not there": (
        good(
            "model: Qwen/Qwen2.5-7B-Instruct",
            "model: {name: /srv/m, source: archive, archive: /no/such.tar}",
        ),
        3,
        ["model.archive", "there is no file /no/such.tar on this machine"],
    ),
    "an archive for the hub": (
        good(
            "model: Qwen/Qwen2.5-7B-Instruct",
            f"model: {{name: Qwen/Qwen2.5, source: archive, archive: {__file__}}}",
        ),
        3,
        ["model.name", "with source archive it is a directory on the hosts"],
    ),
    "a directory of the model that is not there": (
        good(
            "model: Qwen/Qwen2.5-7B-Instruct",
            "model: {name: /srv/m, source: rsync, local: /no/such}",
        ),
        3,
        ["model.local", "there is no directory /no/such on this machine"],
    ),
    "no image": (good("image: vllm/vllm-openai:v0.17.1\n", ""), None, ["image: is missing"]),
    "no hosts": ("image: a\nmodel: b\n", None, ["hosts: is missing"]),
    "hosts without any": ("image: a\nmodel: b\nhosts: {}\n", 3, ["hosts", "at least 1"]),
    "hosts as a list": ("image: a\nmodel: b\nhosts: [a]\n", 3, ["hosts", "a name for each host"]),
    "host without a value": (
        "image: a\nmodel: b\nhosts:\n  h:\n",
        4,
        ["hosts.h", "env, fabric, gpus"],
    ),
    "host without fabric": (
        good("    fabric: {address: 192.168.200.12, interface: enp1s0f1np1}\n", ""),
        5,
        ["hosts.spark-1.fabric: is missing"],
    ),
    "no head": (good("    role: head\n", ""), 4, ["hosts", "role: head"]),
    "two heads": (good(more="    role: head\n"), 11, ["hosts.spark-2.role", "spark-1 is the head"]),
    "duplicate address": (
        good("192.168.200.13, interface", "192.168.200.12, interface"),
        10,
        ["hosts.spark-2.fabric.address", "spark-1 too"],
    ),
    "address outside the subnet": (
        good("192.168.200.13, interface", "192.168.201.13, interface"),
        10,
        ["hosts.spark-2.fabric.address", "192.168.201.0/24", "192.168.200.0/24"],
    ),
    "other prefix length": (
        good("192.168.200.13, interface", "192.168.200.13/25, interface"),
        10,
        ["192.168.200.0/25"],
    ),
    "address of the network itself": (
        good("192.168.200.13, interface", "192.168.200.0, interface"),
        10,
        ["network or broadcast address"],
    ),
    "loopback address": (
        good("192.168.200.12", "127.0.0.1").replace("192.168.200.13, i", "127.0.0.2, i"),
        7,
        ["127.0.0.1", "another host"],
    ),
    "address that is none": (good("192.168.200.12", "192.168.200.256"), 7, ["not an IPv4 address"]),
    "address as a number": (good("192.168.200.12", "12"), 7, ["hosts.spark-1.fabric.address"]),
    "IPv6 address": (good("192.168.200.12", '"fd00::1"'), 7, ["not an IPv4 address"]),
    "interface with a space": (
        good("interface: enp1s0f1np1}\n  spark-2", "interface: enp1 s0}\n  spark-2"),
        7,
        ["hosts.spark-1.fabric.interface", "not a valid interface name"],
    ),
    "interface name too long": (
        good("interface: enp1s0f1np1}\n  spark-2", "interface: enp1s0f1np1aaaaa1}\n  spark-2"),
        7,
        ["interface"],
    ),
    "hca with a space": (
        good("interface: enp1s0f1np1}\n  spark-2", "interface: e, hcas: [a b]}\n  spark-2"),
        7,
        ["hosts.spark-1.fabric.hcas.0"],
    ),
    "host name with a space": (good("  spark-2:", "  spark 2:"), 8, ["'spark 2'", "host name"]),
    "host named like a group": (good("  spark-2:", "  workers:"), 8, ["hosts.workers", "group"]),
    "ranks and GPUs differ": (
        good(more="serve:\n  tensor_parallel_size: 4\n"),
        12,
        ["serve.tensor_parallel_size", "4 ranks", "2 GPUs"],
    ),
    "pipeline does not divide": (
        good(more="serve:\n  pipeline_parallel_size: 3\n"),
        12,
        ["serve.pipeline_parallel_size", "cannot be divided by 3"],
    ),
    "zero GPUs": (good("    role: head", "    role: head\n    gpus: 0"), 7, ["hosts.spark-1.gpus"]),
    "port 0": (good(more="serve: {port: 0}\n"), 11, ["serve.port", "0"]),
    "port too large": (good(more="serve: {port: 65536}\n"), 11, ["serve.port", "65535"]),
    "port as text": (good(more="serve: {port: http}\n"), 11, ["serve.port", "'http'", "integer"]),
    "port in quotes": (good(more='serve: {port: "8000"}\n'), 11, ["serve.port", "'8000'"]),
    "port as a boolean": (good(more="serve: {port: yes}\n"), 11, ["serve.port", "True"]),
    "same port twice": (good(more="serve: {port: 6379}\n"), None, ["ray.port", "serve.port too"]),
    "port among Ray's own": (good(more="serve: {port: 10005}\n"), 11, ["10001-19999"]),
    "via an unknown host": (
        good("via: spark-1", "via: spark-9"),
        9,
        ["hosts.spark-2.ssh.via", "'spark-9'", "spark-1, spark-2"],
    ),
    "via itself": (good("via: spark-1", "via: spark-2"), 9, ["hosts.spark-2.ssh.via", "circle"]),
    "via in a circle": (
        good("    role: head", "    role: head\n    ssh: {via: spark-2}"),
        7,
        ["ssh.via", "spark-1 -> spark-2 -> spark-1"],
    ),
    "ssh user with a space": (good(more="ssh: {user: a b}\n"), 11, ["ssh.user", "space"]),
    "ssh address like an option": (
        good("address: 192.168.200.13, via", "address: -oProxyCommand=x, via"),
        9,
        ["hosts.spark-2.ssh.address", "starts with '-'"],
    ),
    "env name with =": (good(more="env: {A=B: x}\n"), 11, ["A=B", "variable name"]),
    "env value with a newline": (good(more='env: {A: "x\\ny"}\n'), 11, ["env.A", "line break"]),
    "env value with NUL": (good(more='env: {A: "x\\0y"}\n'), 11, ["env.A", "NUL"]),
    "env value with half a character": (
        good(more='env: {A: "\\ud800"}\n'),
        None,
        ["character"],
    ),
    "env value that is too long": (good(more=f"env: {{A: {'x' * 40000}}}\n"), 11, ["40,000 bytes"]),
    "env value as a boolean": (good(more="env: {A: true}\n"), 11, ["env.A", "in quotes"]),
    "env value as a list": (good(more="env: {A: [1]}\n"), 11, ["env.A"]),
    "env of a host as a list": (good(more="    env: [A]\n"), 11, ["hosts.spark-2.env"]),
    "flag managed elsewhere": (
        good(more="serve:\n  flags:\n    port: 9000\n"),
        13,
        ["serve.flags.port", "serve.port"],
    ),
    "flag with dashes": (
        good(more="serve:\n  flags:\n    --enforce-eager: true\n"),
        13,
        ["--enforce-eager", "without the dashes"],
    ),
    "api key as a flag": (
        good(more="serve:\n  flags:\n    api-key: x\n"),
        13,
        ["process list", "secrets"],
    ),
    "memory share above 1": (
        good(more="serve: {gpu_memory_utilization: 85}\n"),
        11,
        ["serve.gpu_memory_utilization", "less than or equal to 1"],
    ),
    "unknown executor": (good(more="executor: slurm\n"), 11, ["executor", "'ray' or 'mp'"]),
    "mp with unequal GPUs": (
        good("    role: head", "    role: head\n    gpus: 2", more="executor: mp\n"),
        12,
        ["same number of GPUs"],
    ),
    "relative path": (good(more="paths: {cache: cache}\n"), 11, ["paths.cache", "absolute"]),
    "path with a colon": (good(more='paths: {cache: "/a:b"}\n'), 11, ["paths.cache", "':'"]),
    "size without a unit": (good(more="container: {shm_size: 16}\n"), 11, ["container.shm_size"]),
    "image with a space": (good("vllm/vllm-openai:v0.17.1", "a b"), 2, ["image", "space"]),
    "image that is empty": (good("vllm/vllm-openai:v0.17.1", ""), 2, ["image", "no value"]),
    "deadline of zero": (good(more="deadlines: {ray: 0}\n"), 11, ["deadlines.ray"]),
    "secret without a source": (good(more="secrets: {HF_TOKEN: {}}\n"), 11, ["exactly one source"]),
    "secret not in the environment": (
        good(more="secrets: {HF_TOKEN: {env: NO_SUCH_VARIABLE}}\n"),
        11,
        ["secrets.HF_TOKEN", "NO_SUCH_VARIABLE is not set"],
    ),
    "secret file that is absent": (
        good(more="secrets: {HF_TOKEN: {file: /no/such/file}}\n"),
        11,
        ["/no/such/file", "No such file"],
    ),
    "secret written out": (
        good(more="secrets: {HF_TOKEN: hf_secret}\n"),
        11,
        ["secrets.HF_TOKEN", "env, file"],
    ),
    "duplicate key": (good(more="model: other\n"), 11, ["'model'", "line 3"]),
    "duplicate host": (good("  spark-2:", "  spark-1:"), 8, ["'spark-1'", "line 5"]),
    "YAML syntax": (good("hosts:", "hosts: ]"), 4, ["not YAML"]),
    "unclosed quote": (good("Qwen/Qwen2.5-7B-Instruct", '"Qwen'), None, ["not YAML"]),
    "tabs": (good("    role: head", "\trole: head"), 6, ["tab", "spaces"]),
    "two documents": (good(more="---\nimage: x\n"), None, ["document"]),
    "empty file": ("", None, ["empty"]),
    "only comments": ("# nothing\n", None, ["empty"]),
    "list at the top": ("- image: a\n", 1, ["a list"]),
    "text at the top": ("hello\n", 1, ["a single value"]),
    "10 MB": ("# x\n" * 2_500_000, None, ["10,000,000 bytes", "too large"]),
    "not UTF-8": (GOOD.encode().replace(b"Qwen", b"Qw\xe9n"), None, ["not UTF-8", "0xe9"]),
    "control character": (good("Qwen/", "Q\x01/"), None, ["does not allow"]),
    "binary": (bytes(range(256)), None, ["not UTF-8"]),
    "alias bomb": (
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{n}: &{n} [{','.join([f'*{chr(ord(n) - 1)}'] * 10)}]\n" for n in "bcdefgh"),
        None,
        ["too large"],
    ),
    "recursive alias": ("image: a\nmodel: b\nhosts: &h\n  x: *h\n", None, ["too deep"]),
    "python object": ("image: !!python/object/apply:os.system [id]\n", 1, ["not YAML"]),
    "several at once": (good("image:", "imgae:", more="serve: {port: 0}\n"), 2, ["serve.port"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_gets_one_clear_message(name: str, tmp_path: Path) -> None:
    content, line, says = WRONG[name]
    path = tmp_path / "cluster.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ClusterFileError) as caught:
        load(path)
    message = str(caught.value)
    for part in says:
        assert part in message, message
    assert "hf_secret" not in message
    rows = message.splitlines()
    assert all(row.startswith(str(path)) for row in rows), message
    if line is not None:
        assert rows[0].startswith(f"{path}:{line}: "), message
    assert len(rows) <= 3, message
    assert all(len(row) < 700 for row in rows), message


def test_the_table_is_long_enough() -> None:
    assert len(WRONG) >= 40


@pytest.mark.parametrize("name", ["unknown key of a host", "tabs", "10 MB", "recursive alias"])
def test_the_cli_shows_it_without_a_traceback_or_a_connection(name: str, tmp_path: Path) -> None:
    content, _, says = WRONG[name]
    path = tmp_path / "cluster.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    result = _pyinfra(path)
    assert result.returncode == 1
    assert all(part in result.stderr for part in says)
    assert "Traceback" not in result.stderr
    assert "Connecting" not in result.stderr


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = _pyinfra(tmp_path / "none.yaml")
    assert result.returncode == 1
    assert "none.yaml: no such file" in result.stderr
    assert "two-sparks.yaml" in result.stderr
    assert "Traceback" not in result.stderr


def _pyinfra(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pyinfra", "-y", "inventory.py", "deploy.py"],
        cwd=ROOT,
        env={**os.environ, "CLUSTER": str(path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_ten_lines_are_enough() -> None:
    cluster = load(ROOT / "tests" / "clusters" / "two-hosts.yaml")
    assert len([row for row in GOOD.splitlines() if not row.startswith("#")]) <= 10
    assert (cluster.head, cluster.workers) == ("spark-1", ["spark-2"])
    assert cluster.tensor_parallel_size == 2
    assert cluster.gcs_address == "192.168.200.12:6379"


def test_head_comes_first_whatever_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_RAY_TOKEN", "x")
    monkeypatch.setenv("TEST_API_KEY", "y")
    cluster = load(ROOT / "tests" / "clusters" / "four-hosts.yaml")
    assert cluster.nodes == ["node-a", "node-c", "node-b", "node-d"]


@pytest.mark.parametrize("name", ["cluster.yaml", "examples/two-sparks.yaml"])
def test_shipped_files_are_valid(name: str) -> None:
    load(ROOT / "group_data" / name)


def test_every_key_of_the_shipped_file_that_is_commented_out_exists(tmp_path: Path) -> None:
    """Switch the comments on: what they show has to be valid, too."""
    lines = (ROOT / "group_data" / "cluster.yaml").read_text(encoding="utf-8").splitlines()
    shown = [row[2:] for row in lines if row.startswith("# ") and ":" in row.split("#")[1]]
    start = next(index for index, row in enumerate(shown) if row.startswith("ssh:"))
    text = "\n".join([*(row for row in lines if not row.startswith("#")), *shown[start:]])
    text = text.replace("HF_TOKEN: {env: HF_TOKEN}", "HF_TOKEN: {env: PATH}")
    text = text.replace("  VLLM_API_KEY: {file: ~/.config/vllm-api-key}", "")
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    cluster = load(path)
    assert cluster.serve.flags == {"max-num-seqs": 16, "enforce-eager": True}
    assert cluster.deadlines.reach == 15


def test_the_schema_is_current() -> None:
    """Renew it with: make schema."""
    path = ROOT / "group_data" / "cluster.schema.json"
    assert json.loads(path.read_text(encoding="utf-8")) == Cluster.model_json_schema()
