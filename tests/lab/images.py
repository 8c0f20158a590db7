"""What the lab's hosts run: the host images, the vLLM image and a tiny model, each made once.

Everything is named by a hash of what it is made from, so an unchanged input is never built again
and a changed one always is.
"""

import hashlib
import os
import platform
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from .engine import STATE, Engine, apt_install
from .shell import LabError, run, say

NAME = "mnvllm-lab"
# Everything the lab makes in an engine carries it, so that a purge finds it.
LABEL = "mnvllm.lab=1"

_HERE = Path(__file__).parent
_HOST = _HERE / "host"
_VLLM = _HERE / "vllm"
_VLLM_RELEASE = "bookworm"  # of the vLLM image's Debian, which knows nothing of its host's
_PYTHON = "3.11"  # that release's

# Python packages that vLLM asks for and never imports here, and parts of others only needed to
# compile against them or to test them: 2 GB. The torch companions would not even load beside a
# torch built for the CPU only.
_UNUSED = """
    bin torchvision* torchaudio* torchcodec* triton* cv2 opencv*
    torch/test torch/include torch/share torch/bin/test* torch/bin/protoc* torch/lib/*test*
    ray/jars ray/rllib ray/cpp ray/include ray/dashboard/client
    pycountry/locales */tests **/__pycache__ **/*.a
""".split()  # noqa: SIM905  (a list of one pattern per line would be a page long)

# Image layers are packed, pushed and pulled side by side, so let there be some of about one size.
_LAYERS = {"torch": ("torch",), "vllm": ("vllm", "llvmlite", "numpy"), "ray": ("ray",)}


_ONE_BASE = threading.Lock()


def host_image(engine: Engine, release: str) -> str:
    """The image of a lab host with that Debian (and of the registry), built unless it is there."""
    tag = f"{NAME}-host:{release}-{_hash(_HOST)}"
    if not _present(engine, tag):
        _build(engine, tag, _HOST, _base_image(engine, release))
    return tag


def vllm_image(engine: Engine) -> str:
    """The image with real vLLM and Ray for the CPU, built unless the engine has it."""
    also = (*_UNUSED, repr(_LAYERS), platform.machine())
    made_of = _hash(_VLLM, exclude="make_model.py", also=also)
    tag = f"{NAME}-vllm:{made_of}"
    if not _present(engine, tag):
        context = STATE / "build" / "vllm"
        shutil.rmtree(context, ignore_errors=True)
        shutil.copytree(_VLLM, context, ignore=shutil.ignore_patterns("__pycache__"))
        _python_packages(context / "site")
        for layer, packages in _LAYERS.items():
            (context / layer).mkdir()
            for package in packages:
                (context / "site" / package).rename(context / layer / package)
        _build(engine, tag, context, _base_image(engine, _VLLM_RELEASE))
        shutil.rmtree(context)
        # The older builder leaves the first stage of a build behind as an image.
        engine.docker("image", "prune", "-f", "--filter", "label=mnvllm.lab.stage", timeout=120)
    return tag


def tiny_model(engine: Engine, image: str) -> Path:
    """A tar archive that holds the model in a folder named `tiny`, made unless it is there."""
    script = _VLLM / "make_model.py"
    archive = STATE / f"model-{_hash(script)}.tar"
    if not archive.exists():
        say("making the tiny model")
        argv = ["run", "--rm", "--interactive", "--network", "none", "--entrypoint", "python3"]
        made = engine.docker(*argv, image, "-", stdin=script.read_bytes(), timeout=180).stdout
        STATE.mkdir(parents=True, exist_ok=True)
        partial = archive.with_suffix(".partial")
        partial.write_bytes(made)
        partial.rename(archive)
    return archive


def base_tag(release: str) -> str:
    """The name of the image of a bare Debian."""
    return f"{NAME}-base:{release}"


def _base_image(engine: Engine, release: str) -> str:
    tag = base_tag(release)
    # Images are built side by side, and two of them stand on the same base.
    with _ONE_BASE:
        if _present(engine, tag):
            return tag
        hub = f"debian:{release}-slim"
        try:
            engine.docker("pull", "-q", hub, timeout=180)
        except LabError:
            say(f"cannot pull {hub}: making a base image with debootstrap")
            _debootstrap(engine, release, tag)
        else:
            engine.docker("tag", hub, tag)
    return tag


def _debootstrap(engine: Engine, release: str, tag: str) -> None:
    if not shutil.which("debootstrap"):
        apt_install("debootstrap")
    if os.geteuid() != 0:
        raise LabError("debootstrap needs root: run this as root, or where Docker Hub is reachable")
    with tempfile.TemporaryDirectory() as folder:
        run(["debootstrap", "--variant=minbase", release, f"{folder}/root"], timeout=600)
        tar = Path(folder, "root.tar")
        run(["tar", "-C", f"{folder}/root", "-cf", str(tar), "."], timeout=120)
        engine.docker("import", str(tar), tag, timeout=300)


def _build(engine: Engine, tag: str, context: Path, base: str) -> None:
    say(f"building {tag}")
    argv = ["build", "-q", "--network", "host", "--build-arg", f"BASE={base}", "--label", LABEL]
    engine.docker(*argv, "-t", tag, str(context), timeout=1200)


def _present(engine: Engine, tag: str) -> bool:
    return bool(engine.text("image", "inspect", "-f", "{{.Id}}", tag, check=False))


def _python_packages(target: Path) -> None:
    """Install the packages of requirements.txt for the image's Python, without what it never uses.

    From outside the image, so that this machine's pip configuration applies. pip finds the CPU
    build of torch only where it is told of a place that has it; uv knows PyTorch's own.
    """
    problems: list[str] = []
    installers: list[Callable[[Path], list[str]]] = [_pip, _uv]
    for installer in installers:
        say(f"installing vLLM, torch and Ray for the CPU with {installer.__name__.strip('_')}")
        shutil.rmtree(target, ignore_errors=True)
        try:
            run(installer(target), timeout=1200)
            break
        except LabError as problem:
            problems.append(str(problem))
    else:
        raise LabError(
            "neither pip nor uv could install the packages of tests/lab/vllm/requirements.txt.\n"
            "Both need PyPI and a torch build for the CPU: an index that has it, or a folder of\n"
            "wheels set as pip's find-links.\n" + "\n".join(problems)
        )
    for pattern in _UNUSED:
        for path in target.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _pip(target: Path) -> list[str]:
    # pip does not derive older platform tags from newer ones, so name all that Debian's libc runs.
    machine = platform.machine()
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(36, 4, -1)]
    tags += [f"manylinux2014_{machine}", f"linux_{machine}"]
    argv = [str(_tools() / "python"), "-m", "pip", "install", "-q", "--no-compile"]
    argv += ["--python-version", _PYTHON, "--implementation", "cp", "--only-binary", ":all:"]
    argv += [word for tag in tags for word in ("--platform", tag)]
    return [*argv, "--target", str(target), "-r", str(_VLLM / "requirements.txt")]


def _uv(target: Path) -> list[str]:
    tools = _tools()
    run([str(tools / "python"), "-m", "pip", "install", "-q", "uv"], timeout=300)
    argv = [str(tools / "uv"), "pip", "install", "-q", "--no-config", "--torch-backend", "cpu"]
    argv += ["--python-version", _PYTHON, "--only-binary", ":all:"]
    argv += ["--python-platform", f"{platform.machine()}-manylinux_2_36"]
    return [*argv, "--target", str(target), "-r", str(_VLLM / "requirements.txt")]


def _tools() -> Path:
    """The bin folder of a virtual environment with pip in it, made unless it is there."""
    folder = STATE / "venv"
    if not (folder / "bin" / "pip").exists():
        run([sys.executable, "-m", "venv", "--clear", str(folder)], timeout=120)
    return folder / "bin"


def _hash(path: Path, exclude: str = "", also: tuple[str, ...] = ()) -> str:
    """A short hash of a file, or of a folder's files with their names and modes."""
    digest = hashlib.sha256(repr(also).encode())
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in files:
        if file.is_file() and file.name != exclude and "__pycache__" not in file.parts:
            executable = bool(file.stat().st_mode & 0o100)
            digest.update(f"{file.relative_to(path)}\0{executable}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
