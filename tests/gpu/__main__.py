"""The deployment's output on real GPUs: python -m tests.gpu check|pack|plan|run|judge."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import GpuTestError

FOLDER = Path(os.environ.get("LAB_DIR") or ".lab") / "gpu"
MODELS = Path("/srv/models")
PYTHON = (3, 12)
"""Of the GPU machine; what pack brings is for this one."""
NEEDS = """\
`make gpu-test` needs Linux with an NVIDIA GPU (two are better), root, and a Python 3.12 with
torch 2.11 and transformers. Where there is none: run `python -m tests.gpu pack` and `plan` here,
carry .lab/gpu with this repository to such a machine, and run it there. It needs no network."""


def main() -> int:
    """Run one command; 1 if it failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="say whether this machine can run it")
    commands.add_parser("pack", help="download and pack what the GPU machine lacks")
    commands.add_parser("plan", help="render every case with the deployment's own code")
    run = commands.add_parser("run", help="run cases on this machine, which has GPUs; as root")
    run.add_argument("case", nargs="*", help="default: all; or prove, prove-ray, serve")
    run.add_argument("--out", type=Path, default=FOLDER / "out", help="folder of what came of it")
    run.add_argument("--work", type=Path, default=Path("/opt/gpu-test"), help="where to unpack")
    run.add_argument("--site", type=Path, action="append", help="packages to use instead")
    run.add_argument("--without-gpu", action="store_true", help="to try this runner itself")
    judge = commands.add_parser("judge", help="say what the reports of a run mean")
    judge.add_argument("reports", type=Path, help="folder of CASE-NODE.json")
    arguments = parser.parse_args()
    try:
        return _run(arguments)
    except GpuTestError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "pack":
        from .pack import pack

        for piece in pack(FOLDER):
            print(f"{piece}  {piece.stat().st_size / 2**20:.0f} MiB")
        return 0
    if arguments.command == "plan":
        from .plan import plan

        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "plan.json").write_text(json.dumps(plan(), indent=1) + "\n")
        print(FOLDER / "plan.json")
        return 0
    if arguments.command == "check":
        print("\n".join(_needed()))
        return 0
    if arguments.command == "judge":
        from .verdicts import judged

        print(judged(arguments.reports))
        return 0
    return _on_gpus(arguments)


def _needed(without_gpu: bool = False) -> list[str]:
    """The GPUs here. Raises GpuTestError where this machine cannot run it."""
    from .nodes import gpus

    cards = gpus()
    if not cards and not without_gpu:
        raise GpuTestError(f"no NVIDIA GPU on this machine (nvidia-smi lists none).\n{NEEDS}")
    if os.geteuid():
        raise GpuTestError(f"not root, and namespaces need it.\n{NEEDS}")
    return cards


def _on_gpus(arguments: argparse.Namespace) -> int:
    from .run import Runner, say, unpack

    cards = _needed(arguments.without_gpu)
    if not arguments.site and (sys.version_info[:2] != PYTHON or not find_spec("torch")):
        version = ".".join(map(str, sys.version_info[:2]))
        raise GpuTestError(f"{sys.executable} is Python {version}, or has no torch.\n{NEEDS}")
    plan = _plan()
    if not arguments.site:
        unpack(FOLDER / "pieces", arguments.work)
    if not (MODELS / "moe").exists():
        maker = Path(__file__).with_name("models.py")
        site = arguments.site or []
        env = {**os.environ, "PYTHONPATH": ":".join(map(str, site))}
        if subprocess.run(
            [sys.executable, str(maker), str(MODELS)], env=env, check=False
        ).returncode:
            raise GpuTestError(f"the models could not be made: see above.\n{NEEDS}")
    say(f"ready: {', '.join(cards) or 'no GPU'}")
    site = arguments.site or [arguments.work / "site"]
    runner = Runner(plan, arguments.work, site, arguments.out, len(cards))
    runner.run(_chosen(arguments.case, plan))
    return 1 if any("error" in each for each in runner.results.values()) else 0


def _plan() -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((FOLDER / "plan.json").read_text())
    except OSError:
        raise GpuTestError(
            f"{FOLDER / 'plan.json'} is missing: run `python -m tests.gpu plan` before"
        ) from None
    return found


def _chosen(words: list[str], plan: dict[str, Any]) -> list[str]:
    groups = {key: plan[key] for key in ("prove", "prove-ray")}
    groups["serve"] = [name for name in plan["cases"] if name.startswith(("serve-", "moe-"))]
    chosen = [name for word in words for name in groups.get(word, [word])]
    unknown = sorted(set(chosen) - set(plan["cases"]))
    if unknown:
        raise GpuTestError(f"no such case: {', '.join(unknown)}; there are {list(plan['cases'])}")
    return chosen or list(plan["cases"])


if __name__ == "__main__":
    sys.exit(main())
