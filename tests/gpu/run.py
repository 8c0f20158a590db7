"""Runs the plan on a machine with GPUs: proves layers, serves, asks. Standard library only.

Every case leaves its files in the output folder, and all of it is one archive in the end:
reports/CASE-NODE.json (the last line of remote/prove.py), logs/, results.json (seconds, answers,
tokens per second, bytes).
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cluster.remote.wait_unit import Progress

from . import GpuTestError, container
from .container import Container
from .nodes import Ip, Node, network, raise_limits, route

Case = dict[str, Any]
TOGETHER = 4
"""Cases that are proven at the same time: most of their seconds are waiting."""
PROVE_SECONDS = 100
SERVE_SECONDS = 300
BENCH_TOKENS = 128
BENCH_REQUESTS = (1, 16, 64)
PROMPT = list(range(10, 42))
"""Token ids, the same for every model."""
KEPT_LOGS = re.compile(r"/(worker-.*\.(out|err)|raylet\.out|gcs_server\.out)$")

_STARTED = time.monotonic()


def say(text: str) -> None:
    """Print one progress line with the seconds since this process started."""
    print(f"[{time.monotonic() - _STARTED:6.1f}s] {text}", flush=True)


class Runner:
    """Goes through cases on two nodes; `site` are folders of Python packages."""

    def __init__(
        self, plan: dict[str, Any], work: Path, site: Sequence[Path], out: Path, cards: int
    ) -> None:
        self.plan, self.site, self.out = plan, site, out
        self.ip = Ip(work)
        first = plan["cases"]["good"]["nodes"]
        self.nodes = [
            Node(name, index, each["address"], index % max(cards, 1), work / "nodes")
            for index, (name, each) in enumerate(first.items())
        ]
        self.interface = str(next(iter(first.values()))["interface"])
        self.results: dict[str, Any] = {}
        with contextlib.suppress(OSError):  # what an earlier run of other cases has found
            self.results = json.loads((out / "results.json").read_text())
        for name in ("reports", "logs"):
            (out / name).mkdir(parents=True, exist_ok=True)

    def run(self, names: Sequence[str]) -> None:
        """Run cases, in groups that need the same nodes; a case that fails does not stop others."""
        with network(self.ip, self.nodes, self.interface):
            for name in ("prove", *self.plan["cases"]):
                chosen = [each for each in self.plan["prove"] if each in names]
                if name == "prove":
                    self.attempt(name, lambda chosen=chosen: self.prove_all(chosen))
                elif name in names and name not in chosen:
                    step = self.prove_ray if name in self.plan["prove-ray"] else self.serve
                    self.results.pop(name, None)
                    self.attempt(name, lambda name=name, step=step: step(name))
        for name, difference in differences(self.results).items():
            say(f"{name}: {difference}")

    def attempt(self, name: str, step: Any) -> None:
        """Run one step; write down what came of it, also when that is a failure."""
        try:
            step()
        except (GpuTestError, OSError, subprocess.SubprocessError, ValueError) as error:
            say(f"{name}: {type(error).__name__}: {error}")
            self.results.setdefault(name, {})["error"] = str(error)
        finally:
            for node in self.nodes:
                self.keep_ray_logs(name, node)
                node.stop()
            (self.out / "results.json").write_text(json.dumps(self.results, indent=1) + "\n")
            self.archive()

    def archive(self) -> None:
        """All of the output, in one file beside it."""
        with tarfile.open(self.out.with_suffix(".tar.gz"), "w:gz") as tar:
            tar.add(self.out, arcname=self.out.name)

    # Parts of a case

    def boot(self, case: Case) -> list[Node]:
        """Start the nodes of a case."""
        booted = []
        for node in self.nodes:
            if node.name in case["nodes"]:
                wanted = case["nodes"][node.name]
                runs = [container.read(run, self.plan["image"]) for run in wanted["runs"].values()]
                for each in runs:
                    raise_limits(each.ulimits)
                node.start(self.ip, wanted["files"], runs)
                booted.append(node)
        return booted

    def container(self, case: Case, node: Node, name: str) -> Container | None:
        """A container of a node, by its short name."""
        run = case["nodes"][node.name]["runs"].get(name)
        return container.read(run, self.plan["image"]) if run else None

    def environment(self, case: Case, node: Node) -> dict[str, str]:
        """The environment of every container of a node."""
        wanted = case["nodes"][node.name]
        variables: dict[str, str] = {}
        for run in wanted["runs"].values():
            for path in container.read(run, self.plan["image"]).env_files:
                variables |= container.environment(wanted["files"][path])
        return node.environment(self.site, variables)

    def start(self, case: Case, node: Node, name: str, log: Path) -> subprocess.Popen[bytes] | None:
        """Start a container of a node, if it has that one."""
        wanted = self.container(case, node, name)
        if wanted is None:
            return None
        with log.open("wb") as stream:
            process = node.spawn(wanted.argv, self.environment(case, node), stream)
        assert process.stdin is not None
        process.stdin.close()
        return process

    def program(
        self, case: Case, node: Node, name: str, arguments: list[str], errors: Path
    ) -> subprocess.Popen[bytes]:
        """Start a program of remote/ in a node, as docker exec -i does: it comes over stdin."""
        with errors.open("wb") as stream:
            argv = ["python3", *arguments]
            process = node.spawn(argv, self.environment(case, node), errors=stream)
        assert process.stdin is not None
        process.stdin.write(self.plan["programs"][name].encode())
        process.stdin.close()
        process.stdin = None
        return process

    def answer(self, case: Case, node: Node, name: str, arguments: list[str]) -> tuple[int, str]:
        """Run a program of remote/ to its end: exit code and all that it said."""
        errors = self.out / "logs" / f"{name}-{node.name}.err"
        process = self.program(case, node, name, arguments, errors)
        output, _ = process.communicate(timeout=PROVE_SECONDS)
        return process.returncode, (output.decode() + errors.read_text()).strip()

    # Prove

    def prove_all(self, names: Sequence[str]) -> None:
        """Prove cases that need nothing but the nodes, several at a time."""
        if not names:
            return
        cases = self.plan["cases"]
        self.boot(cases[names[0]])
        alone = [[name] for name in names if name == "good"]
        rest = [name for name in names if name != "good"]
        for is_routed in (False, True):
            route(is_routed)
            group = [name for name in rest if cases[name]["is_routed"] is is_routed]
            batches = [group[at : at + TOGETHER] for at in range(0, len(group), TOGETHER)]
            for batch in (alone if not is_routed else []) + batches:
                self.prove(batch)
        route(False)

    def prove(self, names: Sequence[str]) -> None:
        """Run remote/prove.py in all nodes for some cases at once; keep the reports."""
        began = time.monotonic()
        running = []
        for name in names:
            case = self.plan["cases"][name]
            for node in self.nodes:
                errors = self.out / "logs" / f"prove-{name}-{node.name}.err"
                arguments = case["nodes"][node.name]["prove"]
                process = self.program(case, node, "prove", arguments, errors)
                running.append((name, node, process))
        for name, node, process in running:
            left = PROVE_SECONDS - (time.monotonic() - began)
            try:
                output, _ = process.communicate(timeout=max(left, 1))
            except subprocess.TimeoutExpired:
                process.kill()
                output = b""
            lines = output.decode().splitlines() or ["{}"]
            report = self.out / "reports" / f"{name}-{node.name}.json"
            report.write_text(lines[-1] + "\n")
            layers = json.loads(lines[-1]).get("layers", {})
            states = ", ".join(f"{key} {each['state']}" for key, each in layers.items())
            say(f"prove {name} on {node.name}: {states or 'no report'}")
        self.results.setdefault("prove", {})[",".join(names)] = round(time.monotonic() - began, 2)

    def start_ray(self, name: str) -> None:
        """Start Ray on all nodes, and wait until it lists them all."""
        case, began = self.plan["cases"][name], time.monotonic()
        for node in self.nodes:
            reach = json.dumps(case["nodes"][node.name]["reach"])
            if node.index and self.container(case, node, "ray"):
                code, said = self.answer(case, node, "reach", ["-", "reach", reach])
                if code:
                    raise GpuTestError(said)
            self.start(case, node, "ray", self.out / "logs" / f"{name}-ray-{node.name}.log")
        code, said = self.answer(case, self.nodes[0], "ray_nodes", case["ray_nodes"])
        seconds = round(time.monotonic() - began, 2)
        say(f"{name}: Ray lists the nodes after {seconds} s: {said or 'all as expected'}")
        self.results.setdefault(name, {})["ray"] = {"seconds": seconds, "said": said, "code": code}

    def prove_ray(self, name: str) -> None:
        """Bring Ray up, then prove."""
        case = self.plan["cases"][name]
        self.boot(case)
        self.start_ray(name)
        self.prove([name])

    # Serve

    def serve(self, name: str) -> None:
        """Serve, follow the log, ask."""
        case = self.plan["cases"][name]
        booted = self.boot(case)
        found = self.results.setdefault(name, {})
        if case["executor"] == "ray":
            self.start_ray(name)
        began = time.monotonic()
        logs = {node.name: self.out / "logs" / f"{name}-{node.name}.log" for node in booted}
        processes = [self.start(case, node, "serve", logs[node.name]) for node in booted]
        head = booted[0]
        with log_lines(logs[head.name]) as lines:
            self.follow(name, processes[0], lines)
        found["log_ready_seconds"] = round(time.monotonic() - began, 2)
        wanted = json.dumps(case["completion"])
        _, said = self.answer(case, head, "completion", ["-", "completion", wanted])
        found["completion"] = json.loads(said.splitlines()[0])
        found["first_completion_seconds"] = round(time.monotonic() - began, 2)
        say(f"{name}: {found['completion']} after {found['first_completion_seconds']} s")
        found["memory_used_mib"] = memory()
        api = f"http://{head.management}:{case['port']}/v1/completions"
        found["tokens"] = greedy(api, case["model"])
        if name.startswith("moe"):
            found["tokens_per_second"] = bench(api, case["model"])
        say(f"{name}: {json.dumps({k: v for k, v in found.items() if k != 'completion'})[:600]}")

    def follow(self, name: str, process: Any, lines: Iterator[str | None]) -> None:
        """Show the phases of a start until it is ready. Raises GpuTestError when it is not."""
        progress = Progress(self.plan["progress"])
        end = time.monotonic() + SERVE_SECONDS
        shown = self.results[name].setdefault("phases", [])
        for line in lines:
            news = progress.feed(line) if line is not None else None
            if news:
                shown.append(news)
                say(f"{name}: {news}")
            if progress.ready:
                return
            if line is None and (process.poll() is not None or time.monotonic() > end):
                why = f"ended ({process.poll()})" if process.poll() is not None else "is not ready"
                raise GpuTestError("\n  ".join([f"vllm serve {why}", *progress.tail()]))

    def keep_ray_logs(self, name: str, node: Node) -> None:
        """Copy the few logs of Ray that say something."""
        for path in (node.folder / "volumes/tmp/ray").glob("session_2*/logs/*"):
            if KEPT_LOGS.search(str(path)) and path.stat().st_size:
                target = self.out / "logs" / f"{name}-{node.name}-ray" / path.name
                target.parent.mkdir(exist_ok=True)
                with contextlib.suppress(OSError):
                    target.write_bytes(path.read_bytes()[-200_000:])


@contextlib.contextmanager
def log_lines(path: Path) -> Iterator[Iterator[str | None]]:
    """The lines of a log while it grows; None where there is none for the moment."""

    def lines(stream: Any) -> Iterator[str | None]:
        rest = ""
        while True:
            data = stream.read()
            if not data:
                yield None
                time.sleep(0.1)
            *complete, rest = (rest + data).split("\n")
            yield from complete

    with path.open(errors="replace") as stream:
        yield lines(stream)


def post(url: str, body: dict[str, Any], seconds: float = 120) -> dict[str, Any]:
    """Ask the API; the address is the machine's own, no proxy has business there."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=seconds) as answer:
        return dict(json.load(answer))


def greedy(api: str, model: str) -> dict[str, Any]:
    """The most likely tokens after PROMPT, as text, and their log probabilities."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    choice = post(api, {**body, "ignore_eos": True, "logprobs": 1})["choices"][0]
    said = choice["logprobs"]
    return {"text": choice["text"], "logprobs": said["token_logprobs"], "tokens": said["tokens"]}


def differences(results: dict[str, Any]) -> dict[str, str]:
    """How the answers of two ranks differ from one rank's, by case; nothing while that is missing.

    Raises GpuTestError where a token differs: then tensor parallelism computes the wrong thing.
    """
    one = results.get("serve-one", {}).get("tokens")
    found: dict[str, str] = {}
    for name in ("serve-ray", "serve-mp"):
        two = results.get(name, {}).get("tokens")
        if one is None or two is None:
            continue
        if one["tokens"] != two["tokens"]:
            raise GpuTestError(f"{name} answers {two['text']!r}, one rank {one['text']!r}")
        pairs = zip(one["logprobs"], two["logprobs"], strict=True)
        worst = max(abs(here - there) for here, there in pairs)
        found[name] = (
            f"the {len(one['tokens'])} tokens of one rank; log probabilities within {worst:.1e}"
        )
    return found


def bench(api: str, model: str) -> dict[str, float]:
    """Generated tokens per second, by how many requests go at once."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": BENCH_TOKENS, "ignore_eos": True}
    found = {}
    for count in BENCH_REQUESTS:
        with ThreadPoolExecutor(count) as pool:
            # Kernels are compiled at their first use with a number of sequences.
            list(pool.map(lambda _: post(api, {**body, "max_tokens": 16}), range(count)))
            began = time.monotonic()
            answers = list(pool.map(lambda _: post(api, body), range(count)))
            seconds = time.monotonic() - began
        tokens = sum(int(answer["usage"]["completion_tokens"]) for answer in answers)
        found[str(count)] = round(tokens / seconds, 1)
    return found


def memory() -> list[int]:
    """MiB in use, by GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if shutil.which("nvidia-smi") is None:
        return []
    said = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return [int(line) for line in said.split() if line.isdigit()]


def unpack(pieces: Path, work: Path) -> None:
    """Join the pieces and unpack them, once. Raises GpuTestError."""
    parts = sorted(pieces.glob("[0-9]*"), key=lambda path: int(path.name))
    if not parts:
        raise GpuTestError(f"no pieces in {pieces}: run `python -m tests.gpu pack` before")
    done = work / "unpacked"
    state = json.dumps([[part.name, part.stat().st_size] for part in parts])
    if done.exists() and done.read_text() == state:
        return
    work.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        ["tar", "-xJ", "-C", str(work)], stdin=subprocess.PIPE, stderr=sys.stderr
    ) as tar:
        assert tar.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # tar says why it has ended
            for part in parts:
                tar.stdin.write(part.read_bytes())
            tar.stdin.close()
    if tar.returncode:
        raise GpuTestError(f"the pieces in {pieces} do not make an archive: is one missing?")
    done.write_text(state)
