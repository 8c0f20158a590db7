"""What a rerun costs, measured in one go on the lab: python tests/benchmarks/rerun.py [--start].

Prints a Markdown table. The lab has to be up and deployed (make demo). --start also measures a
start from nothing, which stops the cluster first.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.lab import Lab, existing  # noqa: E402

CLUSTER = ROOT / "tests" / "lab" / "cluster.yaml"
RUNS = 5


def timed(argv: list[str], cluster: Path = CLUSTER) -> float:
    """Wall seconds of a command; stops the benchmark if it fails."""
    began = time.monotonic()
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env={**os.environ, "CLUSTER": str(cluster), "PYINFRA_PROGRESS": "off"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} failed:\n{done.stdout[-3000:]}")
    return seconds


def median(argv: list[str], cluster: Path = CLUSTER) -> float:
    """Median wall seconds of RUNS runs after one that does not count."""
    timed(argv, cluster)
    return statistics.median(timed(argv, cluster) for _ in range(RUNS))


def pyinfra(*files: str, inventory: str = "inventory.py") -> list[str]:
    """argv of a pyinfra run."""
    return [sys.executable, "-m", "pyinfra", "-y", inventory, *files]


def bare_ssh(hosts: list[str]) -> float:
    """`ssh HOST true` on all hosts at once."""
    argv = [["ssh", "-F", ".cluster/ssh_config", host, "true"] for host in hosts]
    with ThreadPoolExecutor() as pool:
        began = time.monotonic()
        list(pool.map(timed, argv))
        return time.monotonic() - began


def counts(lab: Lab, argv: list[str]) -> dict[str, tuple[int, int]]:
    """{host: (ssh logins, commands run with sudo)} of one run, from the hosts' own journals."""
    since = {host: lab.exec(host, "date", "+%Y-%m-%d %H:%M:%S.%N").strip() for host in lab.hosts}
    time.sleep(1)
    timed(argv)
    time.sleep(1)
    found = {}
    for host in lab.hosts:
        journal = lab.exec(host, "journalctl", "--no-pager", "-o", "cat", "--since", since[host])
        logins = len(re.findall("Accepted publickey", journal))
        found[host] = (logins, len(re.findall(r"COMMAND=", journal)))
    return found


def fake_cluster(folder: Path, hosts: int) -> Path:
    """A cluster file of so many hosts, for pyinfra's @fake connector."""
    rows = ["image: a/b:c", "model: m/n", "hosts:"]
    for index in range(hosts):
        role = "head" if index == 0 else "worker"
        address = f"10.0.{index // 200}.{index % 200 + 1}/16"
        rows.append(f"  h{index}: {{role: {role}, fabric: {{address: {address}, interface: e}}}}")
    path = folder / f"{hosts}.yaml"
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def controller_ms_per_host() -> tuple[float, float, float]:
    """Seconds with 2 and with 64 settled @fake hosts, and ms per further host."""
    argv = pyinfra("deploy.py", inventory="tests/benchmarks/settled.py")
    with tempfile.TemporaryDirectory() as folder:
        few = median(argv, fake_cluster(Path(folder), 2))
        many = median(argv, fake_cluster(Path(folder), 64))
    return few, many, (many - few) / 62 * 1000


def start_from_nothing(lab: Lab) -> list[tuple[str, str]]:
    """From the start of deploy.py to the vLLM process, less what Ray takes."""
    timed(pyinfra("tasks/stop.py"))
    began = datetime.now(timezone.utc)
    total = timed(pyinfra("deploy.py"))

    def started(container: str) -> float:
        form = "{{.State.StartedAt}}"
        text = lab.exec("spark-1", "docker", "inspect", "-f", form, container).strip()
        moment = datetime.fromisoformat(text[:26] + "+00:00")
        return (moment - began).total_seconds()

    serve, ray = started("vllm-serve"), started("vllm-ray")
    return [
        ("deploy.py to Ray's container on the head", f"{ray:.1f} s"),
        (
            "Ray's container to vLLM's: Ray on the head, on the workers, prove",
            f"{serve - ray:.1f} s",
        ),
        ("deploy.py to vLLM's container", f"{serve:.1f} s"),
        ("deploy.py to the completion", f"{total:.1f} s"),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", action="store_true", help="also a start from nothing")
    options = parser.parse_args()
    lab = existing()
    if lab is None:
        raise SystemExit("the lab is not up: make demo")
    start = start_from_nothing(lab) if options.start else []
    timed(pyinfra("deploy.py"))
    ssh = statistics.median(bare_ssh(lab.hosts) for _ in range(RUNS))
    python = median([sys.executable, "-m", "pyinfra", "--version"])
    connect = median(pyinfra("tests/benchmarks/nothing.py"))
    rerun = median(pyinfra("deploy.py"))
    few, many, per_host = controller_ms_per_host()
    rows = [
        ("no-op rerun of deploy.py, two hosts", f"{rerun:.2f} s"),
        ("  of it: Python and pyinfra start (`pyinfra --version`)", f"{python:.2f} s"),
        (
            "  of it: cluster.yaml and connecting (an empty deploy)",
            f"{connect - python:.2f} s",
        ),
        ("  of it: operations and facts", f"{rerun - connect:.2f} s"),
        ("floor: `ssh HOST true` on both hosts at once", f"{ssh:.2f} s"),
        ("rerun / (Python start + ssh)", f"{rerun / (python + ssh):.2f}"),
        *(
            (f"{host}: ssh logins, commands", f"{logins}, {commands}")
            for host, (logins, commands) in counts(lab, pyinfra("deploy.py")).items()
        ),
        ("rerun with 2 @fake hosts", f"{few:.2f} s"),
        ("rerun with 64 @fake hosts", f"{many:.2f} s"),
        ("controller's time per further host", f"{per_host:.0f} ms"),
        *start,
    ]
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, medians of {RUNS}\n")
    print("| what | measured |\n|---|---|")
    for label, value in rows:
        print(f"| {label} | {value} |")


if __name__ == "__main__":
    main()
