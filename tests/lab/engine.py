"""Which Docker engine carries the lab: the one that answers, else a private one of our own.

The private engine has its own socket, data root and pid file, so it never touches another one. It
outlives the process that started it; `stop` ends it.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from .shell import LabError, last_lines, run, say

REPOSITORY = Path(__file__).resolve().parents[2]
# LAB_DIR lets a second checkout, or a CI job, share one cache.
STATE = Path(os.environ.get("LAB_DIR") or REPOSITORY / ".lab").resolve()

# A unix socket's path is limited to 108 bytes and a checkout may lie deep: keep it short.
_RUN = Path("/run" if os.access("/run", os.W_OK) else tempfile.gettempdir()) / (
    "mnvllm-" + hashlib.sha256(str(STATE).encode()).hexdigest()[:8]
)
_PID_FILE = _RUN / "pid"
_SOCKET = _RUN / "docker.sock"
_LOG = STATE / "dockerd.log"


@dataclass(frozen=True)
class Engine:
    """A Docker engine that answers. `private`: it is ours, to be stopped with the lab."""

    private: bool

    def docker(
        self,
        *argv: str,
        timeout: float = 60,
        stdin: bytes = b"",
        check: bool = True,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run the docker client against this engine."""
        return run(
            ["docker", *argv], timeout=timeout, stdin=stdin, env=self.environment(), check=check
        )

    def text(self, *argv: str, timeout: float = 60, check: bool = True) -> str:
        """What a docker command prints on stdout; empty if it failed and check is false."""
        done = self.docker(*argv, timeout=timeout, check=check)
        return done.stdout.decode().strip() if done.returncode == 0 else ""

    def environment(self) -> dict[str, str]:
        """The environment in which the docker client finds this engine."""
        environment = dict(os.environ)
        if self.private:
            environment["DOCKER_HOST"] = f"unix://{_SOCKET}"
            environment.pop("DOCKER_CONTEXT", None)
        return environment


def find() -> Engine | None:
    """The engine that the lab uses, if it is running; starts nothing."""
    if _private_pid() is not None:
        return Engine(private=True)
    if shutil.which("docker") and _answers(Engine(private=False)):
        return Engine(private=False)
    return None


def start() -> Engine:
    """The engine that the lab uses, started if need be. Raises LabError if there can be none."""
    engine = find()
    if engine:
        return engine
    if os.geteuid() != 0:
        raise LabError(
            "no Docker engine answers, and starting a private one needs root.\n"
            "Start Docker (or set DOCKER_HOST), or run this as root."
        )
    if not (shutil.which("dockerd") and shutil.which("docker")):
        apt_install("docker.io", "iptables")
        engine = find()
        if engine:  # the package may have started the system's engine
            return engine
    return _start_private()


def stop() -> None:
    """Stop the private engine, if it runs."""
    pid = _private_pid()
    if pid is None:
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while _private_pid() is not None:
        if time.monotonic() > deadline:
            raise LabError(f"the private dockerd (pid {pid}) did not stop in 60 s; see {_LOG}")
        time.sleep(0.1)
    # dockerd leaves its own network namespace mounted here, which would keep the folder.
    run(["umount", str(_RUN / "exec" / "netns" / "default")], check=False)
    shutil.rmtree(_RUN, ignore_errors=True)
    say("private Docker engine stopped")


def apt_install(*packages: str) -> None:
    """Install Debian packages on this machine; raises LabError where that is not possible."""
    names = " ".join(packages)
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise LabError(f"these are needed and not installed: {names}")
    say(f"apt-get install {names}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-q"], timeout=300, env=environment)
    argv = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *packages]
    run(argv, timeout=600, env=environment)


def _start_private() -> Engine:
    say("no Docker engine answers: starting a private one")
    STATE.mkdir(parents=True, exist_ok=True)
    _RUN.mkdir(mode=0o700, exist_ok=True)
    argv = ["dockerd", "--host", f"unix://{_SOCKET}", "--pidfile", str(_PID_FILE)]
    argv += ["--data-root", str(STATE / "engine"), "--exec-root", str(_RUN / "exec")]
    # The lab makes its own networks; without this there would be one more, with its own subnet.
    argv += ["--bridge", "none"]
    with _LOG.open("ab") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    engine = Engine(private=True)
    deadline = time.monotonic() + 60
    while not _answers(engine):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = last_lines(_LOG.read_bytes())
            if process.poll() is None:
                process.terminate()
            raise LabError(f"the private dockerd did not start; the end of {_LOG}:{tail}")
        time.sleep(0.2)
    return engine


def _answers(engine: Engine) -> bool:
    try:
        return engine.docker("info", "-f", "{{.ServerVersion}}", check=False).returncode == 0
    except LabError:
        return False


def _private_pid() -> int | None:
    """The pid of our dockerd; None unless that process really is ours."""
    try:
        pid = int(_PID_FILE.read_text())
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    return pid if str(_PID_FILE).encode() in argv else None
