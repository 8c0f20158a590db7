"""Stops vllm serve's container once its running requests are done, or a deadline has passed.

drain.py ROLE JSON. Argument: container, host, port, refuses (this vLLM takes no new requests once
it is told to stop, and finishes the running ones: 0.18 and newer), drain, stop (seconds).
  drain: stop it.
  open: let connections in again, in case a former drain was killed.

An older vLLM takes requests until it is killed. Before it a rule of iptables refuses connections
meanwhile; one that stands already can still bring requests, until the deadline.
After its engine has stopped, vLLM 0.32 still accepts requests and never answers them, so its server
is not left to end by itself once nothing runs any more.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
from typing import Any, Dict

REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.e+-]+)$", re.M)
IDLE_LOOKS = 2
"""In a row; a request that has just come may not be counted yet."""
GRACE_SECONDS = 5


def requests(server: http.client.HTTPConnection) -> float | None:
    """Requests that run or wait; None where the server does not say."""
    try:
        server.request("GET", "/metrics")
        counts = REQUESTS.findall(server.getresponse().read().decode(errors="replace"))
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return sum(map(float, counts)) if counts else None


def run(*command: str) -> bool:
    """Whether it succeeded; it says nothing."""
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def door(wanted: Dict[str, Any], change: str) -> bool:
    """Close (-I) or open (-D) the port for new connections."""
    program = "ip6tables" if ":" in wanted["host"] else "iptables"
    rule = ("-p", "tcp", "--dport", str(wanted["port"]), "--syn")
    mark = ("-m", "comment", "--comment", "vllm serve is being stopped")
    refuse = ("-j", "REJECT", "--reject-with", "tcp-reset")
    return run(program, "-w", "5", change, "INPUT", *rule, *mark, *refuse)


def drain(wanted: Dict[str, Any], server: http.client.HTTPConnection) -> str:
    """Wait; return what ended the wait."""
    end, idle, told = time.monotonic() + wanted["drain"], 0, None
    while time.monotonic() < end:
        count = requests(server)
        if count is None:
            return "the server does not answer"
        idle = 0 if count else idle + 1
        if idle >= IDLE_LOOKS:
            return "no request runs"
        if count and count != told:
            print("%d requests still run" % count, flush=True)
            told = count
        time.sleep(0.5)
    return "requests still run after %d s" % wanted["drain"]


def main(wanted: Dict[str, Any]) -> int:
    # It fails where the container has ended by itself: then there is nothing to do.
    if wanted["refuses"] and not run("docker", "kill", "--signal=TERM", wanted["container"]):
        return 0
    # One connection, from before the door closes; the server keeps it for some seconds.
    server = http.client.HTTPConnection(wanted["host"], wanted["port"], timeout=3)
    is_closed = not wanted["refuses"] and requests(server) is not None and door(wanted, "-I")
    try:
        print(drain(wanted, server), flush=True)
        grace = GRACE_SECONDS if wanted["refuses"] else wanted["stop"]
        run("docker", "stop", "-t", str(grace), wanted["container"])
    finally:
        if is_closed:
            door(wanted, "-D")
    return 0


def reopen(wanted: Dict[str, Any]) -> int:
    while door(wanted, "-D"):
        print("connections are let in again: a former drain was killed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit({"drain": main, "open": reopen}[sys.argv[1]](json.loads(sys.argv[2])))
