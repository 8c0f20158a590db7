"""Waits until Ray lists every node of the cluster; runs inside Ray's container.

ray_nodes.py --address HOST:PORT --deadline SECONDS NAME=ADDRESS=GPUS ...
Every expected node has to be alive under its own fabric address, with all of its GPUs. A node that
registered under another address is named with the address it took. Exit code 1 at the deadline.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, Dict, List, Tuple

Expected = Dict[str, Tuple[str, float]]
"""{fabric address: (name, gpus)}"""


def judge(expected: Expected, nodes: List[Dict[str, Any]]) -> List[str]:
    """Compare what is expected with Ray's nodes; return what is wrong, in sentences."""
    alive = {node["NodeManagerAddress"]: node for node in nodes if node["Alive"]}
    problems = []
    for address, (name, gpus) in expected.items():
        if address not in alive:
            problems.append("%s is not listed under its fabric address %s" % (name, address))
            continue
        found = alive[address]["Resources"].get("GPU", 0)
        if found < gpus:
            problems.append("%s has %g of %g GPUs" % (name, found, gpus))
    strangers = sorted(set(alive) - set(expected))
    if problems and strangers:
        problems.append(
            "alive under an address that cluster.yaml does not know: %s (a node that took "
            "another network?)" % ", ".join(strangers)
        )
    return problems


def parse(arguments: List[str]) -> Expected:
    expected = {}
    for argument in arguments:
        name, address, gpus = argument.rsplit("=", 2)
        expected[address] = (name, float(gpus))
    return expected


def nodes_of(address: str) -> List[Dict[str, Any]]:
    """Ask the GCS for all nodes. This needs no raylet and starts none."""
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions

    state = GlobalState()
    state._initialize_global_state(GcsClientOptions.create(address, None, True, False))
    try:
        return list(state.node_table())
    finally:
        state.disconnect()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("expected", nargs="+")
    options = parser.parse_args()
    expected = parse(options.expected)
    end = time.monotonic() + options.deadline
    told: List[str] = []
    while True:
        try:
            problems = judge(expected, nodes_of(options.address))
        except Exception as error:
            problems = ["no answer from Ray at %s: %s" % (options.address, error)]
        if not problems:
            print("Ray lists %d of %d nodes" % (len(expected), len(expected)), flush=True)
            return 0
        if time.monotonic() >= end:
            for problem in problems:
                print(problem, file=sys.stderr)
            return 1
        if problems != told:
            print("waiting for Ray: " + "; ".join(problems), flush=True)
            told = problems
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
