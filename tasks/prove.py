"""Prove every network layer in the real containers: Ray, c10d, gloo, vLLM's queue, NCCL.

The verdicts as JSON on stdout: pyinfra -y inventory.py tasks/prove.py --data json=true
It needs Ray up (executor ray). Not while vllm serve loads a model: it uses the GPUs for a moment.
"""

from pyinfra import host

from cluster.operations import prove, status
from cluster.shell import reporter

cluster = host.data.cluster

unless_serving = bool(host.data.get("unless_serving"))

if unless_serving and host.name == cluster.head:
    status.seen(name="Read what the head runs")

prove.proven(name="Prove every network layer", cluster=cluster, unless_serving=unless_serving)

if host.name == reporter(cluster):
    prove.layers_judged(
        name="Judge the layers", cluster=cluster, as_json=bool(host.data.get("json"))
    )
