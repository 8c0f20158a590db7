"""Image and model on a host without internet: both come from the head, over the fabric alone."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.lab.images import NAME
from tests.test_lab import ROOT, command, deploy, environment, pyinfra, variant

pytestmark = pytest.mark.lab

BIG = "/srv/models/big"
AWKWARD = ["with space", "quo'te", 'dou"ble', "ünïcode", "new\nline", "-dash"]
MAKE_BIG = f"""
mkdir -p {BIG}/sub && cd {BIG} || exit 1
test -f shard-1 || head -c 700000000 /dev/urandom > shard-1
test -f shard-2 || head -c 500000000 /dev/urandom > shard-2
truncate -s 5000000000 sparse
: > empty
ln -sf ../shard-1 sub/link
"""


def listening(lab: Lab, host: str) -> set[str]:
    """Addresses with ports that wait for connections, Docker's and Ray's aside."""
    out = lab.exec(host, "ss", "-ltnH", "sport >= :20000 and sport < :32768")
    return {line.split()[3] for line in out.splitlines() if ":28000" not in line}


# containerd keeps for a day what an interrupted pull has brought.
FORGET = """
docker images -q | sort -u | xargs -r docker rmi -f
ctr -n moby leases ls -q | xargs -r ctr -n moby leases rm --sync
"""


def digest_of(lab: Lab, host: str, folder: str) -> str:
    script = (
        "cd \"$0\" && find . -type f -not -name 'sparse' -print0 | sort -z | xargs -0 sha256sum"
    )
    return lab.exec(host, "sh", "-c", f"{script} | sha256sum", folder, timeout=120)


def has_one_image(lab: Lab, name: str = "registry.lab:5000/vllm-cpu:lab") -> bool:
    """Whether both hosts have an image of the same layers; its id is another in every store."""
    inspect = ["docker", "image", "inspect", "-f", "{{json .RootFS}} {{.Config.Env}}", name]
    return len({lab.exec(host, *inspect) for host in lab.hosts}) == 1


def forget_the_image(lab: Lab) -> None:
    pyinfra("tasks/stop.py")
    lab.exec("spark-2", "sh", "-c", FORGET, timeout=120)
    assert lab.exec("spark-2", "docker", "images", "-q") == ""


def interrupted(cluster: Path, task: str, line: str, break_it: Callable[[], object]) -> str:
    """Run a task, break something once it says a line; return its output. It has to fail."""
    process = subprocess.Popen(
        command(task),
        cwd=ROOT,
        env=environment(cluster),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = ""
    for row in process.stdout:
        output += row
        if line in row:
            line = "\0"
            break_it()
    assert process.wait(timeout=120) == 1, output
    assert "Traceback" not in output
    return output


def end(lab: Lab, host: str, program: str, seconds: float) -> None:
    """Kill the program of a transfer on a host, so many seconds after it has begun."""
    script = """
        for try in $(seq 200); do
            if pids=$(pgrep -f "[p]ython3 - $0 .*role.*(send|serve|receive)"); then
                sleep $1
                kill -9 $pids
                exit
            fi
            sleep 0.05
        done
        exit 1
    """
    lab.exec(host, "bash", "-c", script, program, str(seconds))


@pytest.fixture(name="big")
def big_model(lab: Lab, tmp_path: Path) -> Path:
    """A cluster file with a model of 1.2 GB and a sparse file, that is on the head alone."""
    lab.exec("spark-1", "sh", "-c", MAKE_BIG, timeout=120)
    for number, name in enumerate(AWKWARD):
        lab.exec("spark-1", "sh", "-c", 'printf %s "$1" > "$0"', f"{BIG}/{name}", str(number))
    lab.exec("spark-2", "rm", "-rf", BIG)
    return variant(tmp_path, model=BIG)


def test_a_deploy_brings_image_and_model(lab: Lab) -> None:
    forget_the_image(lab)
    lab.exec("spark-2", "rm", "-rf", "/srv/models/tiny")
    result = deploy()
    print("\n".join(line for line in result.output.splitlines() if "GB" in line))
    assert has_one_image(lab)
    tiny = {digest_of(lab, host, "/srv/models/tiny") for host in lab.hosts}
    assert len(tiny) == 1
    assert [listening(lab, host) for host in lab.hosts] == [set(), set()]
    assert deploy().changed == []


def test_a_model_with_awkward_names_arrives_whole(lab: Lab, big: Path) -> None:
    before = [listening(lab, host) for host in lab.hosts]
    result = pyinfra("tasks/model.py", cluster=big)
    assert result.code == 0
    assert digest_of(lab, "spark-1", BIG) == digest_of(lab, "spark-2", BIG)
    assert lab.exec("spark-2", "readlink", f"{BIG}/sub/link").strip() == "../shard-1"
    assert int(lab.exec("spark-2", "du", "-k", f"{BIG}/sparse").split()[0]) < 1000
    assert pyinfra("tasks/model.py", cluster=big).changed == []
    # A shard that is cut short, a file that is another, one that is gone.
    lab.exec("spark-2", "truncate", "-s", "1000", f"{BIG}/shard-2")
    lab.exec("spark-2", "sh", "-c", f"rm {BIG}/empty; echo x >> {BIG}/-dash; echo y > {BIG}/more")
    again = pyinfra("tasks/model.py", cluster=big)
    assert again.code == 0
    assert digest_of(lab, "spark-1", BIG) != digest_of(lab, "spark-2", BIG)  # `more` is still there
    lab.exec("spark-2", "rm", f"{BIG}/more")
    assert digest_of(lab, "spark-1", BIG) == digest_of(lab, "spark-2", BIG)
    assert [listening(lab, host) for host in lab.hosts] == before


@pytest.mark.slow
@pytest.mark.parametrize("host", ["spark-1", "spark-2"])
def test_a_killed_transfer_of_the_model_goes_on(lab: Lab, big: Path, host: str) -> None:
    output = interrupted(
        big, "tasks/model.py", "Bring the model", lambda: end(lab, host, "relay", 0.3)
    )
    assert "spark-" in output
    names = lab.exec("spark-2", "ls", "-A", BIG, check=False).split("\n")
    for name in ("shard-1", "shard-2"):
        if name in names:  # a whole one, or none
            size = lab.exec("spark-2", "stat", "-c", "%s", f"{BIG}/{name}").strip()
            assert size == lab.exec("spark-1", "stat", "-c", "%s", f"{BIG}/{name}").strip()
    assert pyinfra("tasks/model.py", cluster=big).code == 0
    assert digest_of(lab, "spark-1", BIG) == digest_of(lab, "spark-2", BIG)


@pytest.mark.slow
def test_a_full_disk_is_named_before_anything_is_written(lab: Lab, big: Path) -> None:
    lab.exec("spark-2", "sh", "-c", f"mkdir -p {BIG} && mount -t tmpfs -o size=100m tmpfs {BIG}")
    try:
        result = pyinfra("tasks/model.py", cluster=big)
        assert result.code == 1
        assert BIG in result.output
        assert "free" in result.output
        assert "Traceback" not in result.output
        assert lab.exec("spark-2", "find", BIG, "-type", "f") == ""
    finally:
        lab.exec("spark-2", "umount", BIG)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["spark-1", "spark-2"])
def test_a_killed_relay_of_the_image_is_finished_by_the_next_run(
    lab: Lab, tmp_path: Path, host: str
) -> None:
    forget_the_image(lab)
    cluster = variant(tmp_path)
    interrupted(cluster, "tasks/image.py", "Relay the image", lambda: end(lab, host, "registry", 4))
    assert "vllm-cpu" not in lab.exec("spark-2", "docker", "images", "--format", "{{.Repository}}")
    assert pyinfra("tasks/image.py", cluster=cluster).code == 0
    assert has_one_image(lab)
    assert [listening(lab, each) for each in lab.hosts] == [set(), set()]


@pytest.mark.slow
@pytest.mark.parametrize("saver", ["spark-1", "spark-2"])
def test_an_image_from_an_archive(lab: Lab, tmp_path: Path, saver: str) -> None:
    """For sites without any registry: the archive is on this machine, from either image store."""
    name = "site.local/vllm:archive"
    archive = tmp_path / "image.tar"
    lab.exec(saver, "docker", "tag", "registry.lab:5000/vllm-cpu:lab", name)
    save = ["docker", "exec", f"{NAME}-{saver}", "docker", "save", name]
    with archive.open("wb") as file:
        subprocess.run(save, env=lab.engine.environment(), stdout=file, timeout=300, check=True)
    lab.exec(saver, "docker", "rmi", name)
    image = {"name": name, "source": "archive", "archive": str(archive)}
    result = pyinfra("tasks/image.py", cluster=variant(tmp_path, image=image))
    assert result.code == 0
    assert has_one_image(lab, name)
    for each in lab.hosts:
        lab.exec(each, "docker", "rmi", name)


@pytest.mark.slow
def test_a_model_from_this_machine(lab: Lab, tmp_path: Path) -> None:
    """From a directory by rsync, and from a tar file: both are what the head of the lab has."""
    local, root = tmp_path / "tiny", "/srv/models/carried"
    copy = ["docker", "cp", f"{NAME}-spark-1:/srv/models/tiny", str(local)]
    subprocess.run(copy, env=lab.engine.environment(), timeout=60, check=True, capture_output=True)
    archive = tmp_path / "tiny.tar.gz"
    subprocess.run(["tar", "-czf", archive, "-C", tmp_path, "tiny"], check=True)
    tiny = digest_of(lab, "spark-1", "/srv/models/tiny")
    for source in ({"source": "rsync", "local": str(local)}, {"source": "archive"}):
        if source["source"] == "archive":
            source["archive"] = str(archive)
        for host in lab.hosts:
            lab.exec(host, "rm", "-rf", root)
        cluster = variant(tmp_path, model={"name": root, **source})
        result = pyinfra("tasks/model.py", cluster=cluster)
        assert result.code == 0
        assert {digest_of(lab, host, root) for host in lab.hosts} == {tiny}
        assert lab.exec("spark-1", "ls", "-A", root) == lab.exec("spark-2", "ls", "-A", root)
    assert pyinfra("tasks/model.py", cluster=cluster).changed == []
    for host in lab.hosts:
        lab.exec(host, "rm", "-rf", root)
