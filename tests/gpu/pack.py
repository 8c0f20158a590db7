"""What the GPU machine lacks, as one compressed archive cut into pieces that are easy to carry.

vLLM and Ray for that machine's Python, without what it has already (torch, numpy, ...) and without
what these tests never load; and `ip`, with the libraries it needs.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from . import GpuTestError

PYTHON = "3.12"
PACKAGES = Path(__file__).with_name("packages.txt")
PIECE_BYTES = 58 << 20
PIECES = "pieces"
"""Folder of the pieces, named 0, 1, ..., in the order in which they are joined."""
GLIBC = (39, 38, 35, 34, 31, 28, 27, 26, 24, 17)
"""Minor versions of the manylinux_2_N tags that glibc 2.39 accepts; pip matches each exactly."""
LEFT_OUT = re.compile(
    r"^vllm/vllm_flash_attn/_vllm_fa2_C|^vllm/vllm-rs|^vllm/third_party/(deep_gemm|fmha_sm100)/"
    r"|^vllm/_flashmla|^vllm/_qutlass|^vllm/.*/configs/[EN]=.*json|swagger-ui"
    r"|^ray/(rllib|serve|tune|train|data|jars|cpp|dashboard/client|air|llm)/|^ray/core/libjemalloc"
    r"|__pycache__|\.pyi$|/tests?/"
)
"""Kernels for other GPUs, front ends in Rust, and the parts of Ray that are not its core."""
SCRIPTS = {"ray": "ray.scripts.scripts", "vllm": "vllm.entrypoints.cli.main"}
"""Console scripts, by the module whose main() they call."""


def pack(folder: Path) -> list[Path]:
    """Download, trim, compress and cut; return the pieces. Raises GpuTestError."""
    wheels = folder / "wheels"
    archive = folder / "site.tar.xz"
    _download(wheels)
    with archive.open("wb") as output:
        xz = subprocess.Popen(
            ["nice", "-n", "10", "xz", "-4", "-T2", "-c"], stdin=subprocess.PIPE, stdout=output
        )
        assert xz.stdin is not None
        with tarfile.open(fileobj=xz.stdin, mode="w|") as tar:
            for name, data, mode in _content(wheels):
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(data), mode
                tar.addfile(member, BytesIO(data))
        xz.stdin.close()
        if xz.wait():
            raise GpuTestError(f"xz ended with exit code {xz.returncode} while writing {archive}")
    return _cut(archive, folder / PIECES)


def _download(wheels: Path) -> None:
    wheels.mkdir(parents=True, exist_ok=True)
    tags = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC]
    tags += ["manylinux2014_x86_64", "manylinux1_x86_64"]
    argv = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
    argv += ["--no-deps", "--only-binary=:all:", f"--python-version={PYTHON}"]
    argv += ["--implementation=cp", *(f"--platform={tag}" for tag in tags)]
    argv += [f"--dest={wheels}", f"--requirement={PACKAGES}"]
    if subprocess.run(argv, check=False).returncode:
        raise GpuTestError(f"pip could not download what {PACKAGES.name} lists: see above")


def _content(wheels: Path) -> Iterator[tuple[str, bytes, int]]:
    """(name, content, mode) of every file of the archive."""
    for wheel in sorted(wheels.glob("*.whl")):
        yield from _wheel(wheel)
    for name, module in SCRIPTS.items():
        # vLLM starts processes that import this file again.
        text = f"#!/usr/bin/env python3\nfrom {module} import main\n\n"
        text += 'if __name__ == "__main__":\n    main()\n'
        yield f"site/bin/{name}", text.encode(), 0o755
    yield from _ip()


def _wheel(path: Path) -> Iterator[tuple[str, bytes, int]]:
    with zipfile.ZipFile(path) as wheel:
        for info in wheel.infolist():
            name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", info.filename)
            if info.is_dir() or ".data/" in name or LEFT_OUT.search(name):
                continue
            executable = bool(info.external_attr >> 16 & 0o100)
            yield f"site/{name}", wheel.read(info), 0o755 if executable else 0o644


def _ip() -> Iterator[tuple[str, bytes, int]]:
    program = shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin")
    if program is None:
        raise GpuTestError("`ip` is not on this machine: install iproute2, it is packed too")
    yield "bin/ip", Path(program).read_bytes(), 0o755
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for name, library in re.findall(r"(\S+) => (/\S+)", said):
        if not re.match(r"lib(c|m|dl|pthread|resolv)\.so", name):  # those belong to its loader
            yield f"lib/{name}", Path(library).read_bytes(), 0o644


def _cut(archive: Path, pieces: Path) -> list[Path]:
    shutil.rmtree(pieces, ignore_errors=True)
    pieces.mkdir()
    written: list[Path] = []
    with archive.open("rb") as stream:
        while data := stream.read(PIECE_BYTES):
            piece = pieces / str(len(written))
            piece.write_bytes(data)
            written.append(piece)
    archive.unlink()
    return written


def versions(text: str) -> dict[str, str]:
    """{package: version} of a list like packages.txt."""
    rows = csv.reader(text.splitlines(), delimiter="=")
    return {row[0]: row[-1] for row in rows if row and not row[0].startswith("#")}
