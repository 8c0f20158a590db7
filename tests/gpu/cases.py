"""What runs on the two nodes: changes to cluster.yaml, as a user would write them. Data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.settings import Cluster, problems

from . import GpuTestError

FILE = Path(__file__).with_name("cluster.yaml")
RDMA = """
hosts:
  spark-1: {fabric: {hcas: [rocep1s0f1]}}
  spark-2: {fabric: {hcas: [rocep1s0f1]}}
"""
MOE = """
model: /srv/models/moe
serve:
  served_model_name: moe
  max_model_len: 2048
  gpu_memory_utilization: 0.2
  flags:
    dtype: bfloat16
    load-format: dummy
    kv-cache-memory-bytes: 4294967296
    max-num-seqs: 64
env: {VLLM_USE_DEEP_GEMM: 0}
"""


@dataclass(frozen=True)
class Case:
    """One cluster.yaml, by what is different in it: YAML documents, merged one after another.

    null removes what is there. `is_routed`: the management networks reach each other; else packets
    between them vanish, as from a worker without a way to the office. `flags_lost`: flags of
    `ray start` that got lost, which cluster.yaml cannot say.
    """

    name: str
    change: str = ""
    is_routed: bool = False
    flags_lost: tuple[str, ...] = ()


MP = "executor: mp\n---\n"
ALONE = "---\nhosts: {spark-2: null}\n"
PROVE = (
    Case("good", MP),
    Case("nccl-unset", MP + "env: {NCCL_SOCKET_IFNAME: null}"),
    Case("nccl-other-on-worker", MP + "hosts: {spark-2: {env: {NCCL_SOCKET_IFNAME: enP7s7}}}"),
    Case("nccl-other-on-head", MP + "hosts: {spark-1: {env: {NCCL_SOCKET_IFNAME: enP7s7}}}"),
    Case("nccl-loopback", MP + "env: {NCCL_SOCKET_IFNAME: lo}"),
    Case("nccl-absent", MP + "env: {NCCL_SOCKET_IFNAME: enp1s0f0np0}"),
    Case("nccl-net-ib", MP + "env: {NCCL_NET: IB}"),
    Case("nccl-same-host", MP + "env: {NCCL_HOSTID: same}"),
    Case("hca-absent", MP + RDMA),
    Case("hca-by-env", MP + "env: {NCCL_IB_HCA: rocep1s0f1}"),
    Case("gloo-unset", MP + "env: {GLOO_SOCKET_IFNAME: null}"),
    Case("gloo-unset-on-worker", MP + "hosts: {spark-2: {env: {GLOO_SOCKET_IFNAME: null}}}"),
    Case("gloo-absent", MP + "env: {GLOO_SOCKET_IFNAME: enp1s0f0np0}"),
    Case("gloo-other", MP + "env: {GLOO_SOCKET_IFNAME: enP7s7}"),
    Case("host-ip-unset", MP + "env: {VLLM_HOST_IP: null}"),
    Case("host-ip-unset-on-worker", MP + "hosts: {spark-2: {env: {VLLM_HOST_IP: null}}}"),
    Case("nccl-unset-routed", MP + "env: {NCCL_SOCKET_IFNAME: null}", is_routed=True),
    Case("host-ip-unset-routed", MP + "env: {VLLM_HOST_IP: null}", is_routed=True),
)
"""Prove alone, without Ray."""
PROVE_RAY = (
    Case("ray-without-address", flags_lost=("--node-ip-address",)),
    Case("ray-host-ip-unset", "env: {VLLM_HOST_IP: null}"),
    Case("ray-good"),
)
"""Ray, then prove."""
SERVE = (
    Case("serve-ray"),
    Case("serve-mp", MP),
    Case("serve-one", MP + ALONE),
    Case("moe-mp", MP + MOE),
    Case("moe-one", MP + MOE + ALONE),
    Case("moe-one-graphs", MP + MOE + ALONE + "serve: {flags: {enforce-eager: null}}"),
)
"""Prove aside: vllm serve and completions; the tiny model, and one of a real shape."""
ALL = (*PROVE, *PROVE_RAY, *SERVE)


def cluster(case: Case) -> Cluster:
    """cluster.yaml with a case's change. Raises GpuTestError where the result cannot be used."""
    values = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    for change in yaml.safe_load_all(case.change):
        values = _merged(values, change)
    made = Cluster.model_validate(values)
    for problem in problems(made):
        raise GpuTestError(f"case {case.name}: {'.'.join(map(str, problem.keys))}: {problem}")
    return made


def _merged(base: dict[str, Any], change: dict[str, Any] | None) -> dict[str, Any]:
    merged = dict(base)
    for key, value in (change or {}).items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merged(merged[key], value)
        elif value is None and key in merged:
            del merged[key]
        else:
            merged[key] = value
    return merged
