"""Stops vllm serve's container once its running requests are done, or a deadline has passed.

Argument (JSON): container, host, port, refuses (this vLLM takes no new requests once it is told to
stop, and finishes the running ones: 0.18 and newer), drain, stop (seconds).
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
import urllib.request
from typing import Any, Dict

REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.e+-]+)$", re.M)
IDLE_LOOKS = 2
"""In a row; a request that has just come may not be counted yet."""
GRACE_SECONDS = 5


def requests(wanted: Dict[str, Any]) -> float | None:
    """Requests that run or wait; None where the server does not say."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    url = "http://%s:%d/metrics" % (wanted["host"], wanted["port"])
    try:
        with opener.open(url, timeout=3) as page:
            counts = REQUESTS.findall(page.read().decode(errors="replace"))
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return sum(map(float, counts)) if counts else None


def docker(*arguments: str) -> bool:
    done = subprocess.run(
        ["docker", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return done.returncode == 0


def drain(wanted: Dict[str, Any]) -> str:
    """Wait; return what ended the wait."""
    end, idle, told = time.monotonic() + wanted["drain"], 0, None
    while time.monotonic() < end:
        count = requests(wanted)
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
    if wanted["refuses"] and not docker("kill", "--signal=TERM", wanted["container"]):
        return 0
    why = drain(wanted)
    print(why, flush=True)
    grace = GRACE_SECONDS if wanted["refuses"] else wanted["stop"]
    docker("stop", "-t", str(grace), wanted["container"])
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[2])))
