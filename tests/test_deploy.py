"""The whole deploy and every task, offline, through the real CLI."""

import re
from pathlib import Path

import pytest

from tests.conftest import CLUSTERS, Pyinfra
from tests.fleet import Fleet

DEPLOY = [
    "tasks/lock.py | Take the cluster's lock",
    "tasks/preflight.py | Read what the head runs",
    "tasks/preflight.py | Probe the host and the fabric",
    "tasks/preflight.py | Judge what was found",
    "tasks/image.py | See who needs the image",
    "tasks/image.py | Have the image ready on the head",
    "tasks/image.py | Pull the image",
    "tasks/image.py | Relay the image over the fabric",
    "tasks/image.py | See what is in the image",
    "tasks/image.py | Compare the image of all hosts",
    "tasks/model.py | Have the model on the head",
    "tasks/model.py | Compare the model with the head's",
    "tasks/model.py | Bring the model to the other hosts",
    "tasks/model.py | See that all of it is here",
    "tasks/model.py | Make room in the memory",
    "tasks/environment.py | Write env files and units",
    "tasks/ray_head.py | Stop vllm serve if its group changes",
    "tasks/ray_head.py | Start the Ray head",
    "tasks/ray_head.py | Reach the Ray head over the fabric",
    "tasks/ray_workers.py | Start the Ray workers",
    "tasks/ray_workers.py | Wait until Ray lists every node",
    "tasks/prove.py | Read what the head runs",
    "tasks/prove.py | Prove every network layer",
    "tasks/prove.py | Judge the layers",
    "tasks/serve.py | Start vllm serve",
    "tasks/serve.py | Start the watchdog",
    "tasks/verify.py | Ask for a completion",
    "tasks/keep.py | Keep this deployment as known to be good",
]


def test_deploy_runs_its_operations_in_this_order(run: Pyinfra) -> None:
    result = run("-y", "deploy.py")
    assert result.exit_code == 0, result.output
    assert result.operations == DEPLOY
    assert "Hello." in result.output


def test_a_second_run_changes_nothing(run: Pyinfra, fleet: Fleet) -> None:
    first = run("-y", "deploy.py")
    assert fleet["spark-1"].starts == ["vllm-ray", "vllm-serve"]
    assert fleet["spark-2"].starts == ["vllm-ray"]
    second = run("-y", "deploy.py")
    assert first.changes > 5
    assert second.changes == 0
    assert (
        second.output.count("No changes") == len(DEPLOY) + 13
    )  # the worker shares thirteen of them
    assert fleet["spark-1"].starts == ["vllm-ray", "vllm-serve"]
    # node_state, the model; on the head the completion, too
    assert {name: len(commands) for name, commands in second.commands.items()} == {
        "spark-1": 3,
        "spark-2": 2,
    }


def test_each_host_gets_its_own_part(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    head, worker = fleet["spark-1"], fleet["spark-2"]
    assert "VLLM_HOST_IP=192.168.200.12\n" in head.files["/etc/vllm/node.env"]
    assert "VLLM_HOST_IP=192.168.200.13\n" in worker.files["/etc/vllm/node.env"]
    assert "/etc/systemd/system/vllm-serve.service" in head.files
    assert "/etc/systemd/system/vllm-serve.service" not in worker.files
    assert not any("vllm-serve" in command for command in worker.commands if "systemctl" in command)


def test_no_worker_starts_before_the_head_is_reached(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    started = fleet.history.index(("spark-2", "systemctl start --no-block vllm-ray.service"))
    reached = [
        index
        for index, (_, command) in enumerate(fleet.history)
        if command.startswith("python3 - reach")
    ]
    assert len(reached) == 2
    assert max(reached) < started


@pytest.mark.parametrize(
    ("failure", "last"),
    [
        ("systemctl start --no-block vllm-ray", "Start the Ray head"),
        ("docker pull", "Have the image ready on the head"),
        ("python3 - wait_unit", "Start the Ray head"),
    ],
)
def test_a_failed_head_stops_the_workers(
    run: Pyinfra, fleet: Fleet, failure: str, last: str
) -> None:
    fleet["spark-1"].failures[failure] = "it broke"
    result = run("-y", "deploy.py")
    assert result.exit_code == 1
    assert "it broke" in result.output
    assert fleet["spark-2"].starts == []
    assert last in result.output
    assert "Start the Ray workers" not in result.output


def test_a_worker_that_does_not_reach_the_head_stops_all(run: Pyinfra, fleet: Fleet) -> None:
    def unreachable(command: str, stdin: str | None, answer=fleet["spark-2"].answer):
        if command.startswith("python3 - reach"):
            return ["Ray's head cannot be reached: no route"]
        return answer(command, stdin)

    fleet["spark-2"].answer = unreachable  # type: ignore[method-assign]
    result = run("-y", "deploy.py")
    assert result.exit_code == 1
    assert "no route" in result.output
    assert "Traceback" not in result.output
    assert fleet["spark-2"].starts == []
    assert fleet["spark-1"].starts == ["vllm-ray"]


def test_a_wrong_interface_stops_before_anything_starts(run: Pyinfra, fleet: Fleet) -> None:
    fleet["spark-2"].addresses = {"eth7": ["192.168.200.13"]}
    fleet["spark-2"].prefixed = {"eth7": ["192.168.200.13/24"]}
    for task in ("deploy.py", "tasks/environment.py"):
        if task != "deploy.py":
            run("-y", "tasks/image.py")
        result = run("-y", task)
        assert result.exit_code == 1
        assert "hosts.@fake/spark-2.fabric.interface: eth7" in result.output
        assert fleet["spark-2"].files == {}
    assert fleet["spark-1"].starts == fleet["spark-2"].starts == []


def test_different_images_stop_the_deploy_and_are_named(run: Pyinfra, fleet: Fleet) -> None:
    other = "sha256:" + "2" * 64
    fleet["spark-2"].image = {"id": other, "digests": [f"vllm/vllm-openai@{other}"]}
    result = run("-y", "deploy.py")
    assert result.exit_code == 1
    assert f"spark-2: {other}" in result.output
    assert "pull=always" in result.output
    assert fleet["spark-1"].files == {}


def test_one_image_without_a_digest_is_still_the_same(run: Pyinfra, fleet: Fleet) -> None:
    """Loaded from an archive on one host, pulled on the other."""
    fleet["spark-2"].image = {"id": "sha256:" + "0" * 64, "digests": []}
    assert run("-y", "tasks/image.py").exit_code == 0


def test_pull_always_pulls_again(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "tasks/image.py")
    again = run("-y", "tasks/image.py", "--data", "pull=always")
    assert all("docker pull" in " ".join(commands) for commands in again.commands.values())


def test_an_image_without_ray_is_refused_with_the_remedy(run: Pyinfra, fleet: Fleet) -> None:
    fleet["spark-1"].versions["ray"] = None
    result = run("-y", "deploy.py")
    assert result.exit_code == 1
    assert 'pip install "ray==2.56.1"' in result.output
    assert fleet["spark-1"].starts == []


def test_a_changed_serve_flag_restarts_serve_alone(
    run: Pyinfra, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run("-y", "deploy.py")
    before = dict(fleet["spark-1"].running)
    changed = tmp_path_factory.mktemp("clusters") / "cluster.yaml"
    text = (CLUSTERS / "two-hosts.yaml").read_text(encoding="utf-8")
    changed.write_text(f"{text}serve: {{flags: {{max-num-seqs: 4}}}}\n", encoding="utf-8")
    run("-y", "deploy.py", cluster=changed)
    assert fleet["spark-1"].running["vllm-ray"] == before["vllm-ray"]
    assert fleet["spark-1"].running["vllm-serve"] != before["vllm-serve"]
    assert fleet["spark-1"].starts == ["vllm-ray", "vllm-serve", "vllm-serve"]
    assert fleet["spark-2"].starts == ["vllm-ray"]


def test_a_changed_worker_restarts_its_ray_and_serve_in_order(
    run: Pyinfra, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run("-y", "deploy.py")
    changed = tmp_path_factory.mktemp("clusters") / "cluster.yaml"
    text = (CLUSTERS / "two-hosts.yaml").read_text(encoding="utf-8")
    changed.write_text(f"{text}    env: {{NCCL_DEBUG: INFO}}\n", encoding="utf-8")
    del fleet.history[:]
    run("-y", "deploy.py", cluster=changed)
    moves = [
        (name, command) for name, command in fleet.history if re.search("systemctl st", command)
    ]
    assert moves == [
        ("spark-1", "systemctl stop vllm-serve.service"),
        ("spark-2", "systemctl stop vllm-ray.service"),
        ("spark-2", "systemctl start --no-block vllm-ray.service"),
        ("spark-1", "systemctl stop vllm-serve.service"),
        ("spark-1", "systemctl start --no-block vllm-serve.service"),
    ]


def test_a_worker_whose_container_is_gone_takes_serve_with_it(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    fleet["spark-2"].running.clear()
    run("-y", "deploy.py")
    assert fleet["spark-1"].starts == ["vllm-ray", "vllm-serve", "vllm-serve"]
    assert fleet["spark-2"].starts == ["vllm-ray", "vllm-ray"]


def test_interrupted_between_files_and_restart_converges(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    wanted = dict(fleet["spark-1"].running)
    # The files are those of this run; the containers are an earlier run's.
    fleet["spark-1"].running["vllm-serve"] = "0000000000000000"
    run("-y", "deploy.py")
    assert fleet["spark-1"].running == wanted
    assert fleet["spark-1"].starts == ["vllm-ray", "vllm-serve", "vllm-serve"]


def test_interrupted_before_systemd_was_told_converges(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    fleet["spark-2"].untold = True
    assert run("-y", "deploy.py").commands["spark-2"].count("systemctl daemon-reload") == 1
    assert run("-y", "deploy.py").changes == 0


def test_changed_watchdog_settings_reach_systemd(
    run: Pyinfra, fleet: Fleet, tmp_path: Path
) -> None:
    run("-y", "deploy.py")
    text = (CLUSTERS / "two-hosts.yaml").read_text(encoding="utf-8")
    changed = tmp_path / "cluster.yaml"
    changed.write_text(f"{text}\nwatchdog: {{every: 7}}\n", encoding="utf-8")
    assert "systemctl daemon-reload" in run("-y", "deploy.py", cluster=changed).commands["spark-1"]
    changed.write_text(f"{text}\nwatchdog: {{enabled: false}}\n", encoding="utf-8")
    run("-y", "deploy.py", cluster=changed)
    assert fleet["spark-1"].timers == set()
    assert run("-y", "deploy.py", cluster=changed).changes == 0


def test_the_plan_is_not_taken_for_the_state_at_its_execution(run: Pyinfra, fleet: Fleet) -> None:
    """Without -y a person reads the plan first, for as long as they like."""
    run("-y", "deploy.py")
    result = run("tasks/environment.py", input="\n")
    assert result.exit_code == 0, result.output
    looks = [part for part in result.commands["spark-1"] if "node_state" in part]
    assert len(looks) == 2


def test_no_completion_fails_the_run(run: Pyinfra, fleet: Fleet) -> None:
    fleet["spark-1"].completion = {"error": "HTTP 500: engine died", "seconds": 0.2}
    result = run("-y", "deploy.py")
    assert result.exit_code == 1
    assert "engine died" in result.output
    assert "tasks/logs.py" in result.output


def test_dry_run_with_diff_shows_the_files_and_touches_nothing(run: Pyinfra, fleet: Fleet) -> None:
    fleet["spark-1"].image = fleet["spark-2"].image = {"id": "sha256:abc", "digests": []}
    result = run("--dry", "--diff", "deploy.py")
    assert result.exit_code == 0, result.output
    assert "+VLLM_HOST_IP=192.168.200.13" in result.output
    assert fleet["spark-1"].files == {}
    assert fleet["spark-1"].starts == []


def test_secrets_show_nowhere(run: Pyinfra, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_RAY_TOKEN", "s3cret-ray")
    monkeypatch.setenv("TEST_API_KEY", "s3cret-key")
    cluster = CLUSTERS / "four-hosts.yaml"
    for arguments in (("--dry", "--diff"), ("-y", "-vvv", "--diff"), ("--dry", "--json")):
        result = run(*arguments, "deploy.py", cluster=cluster)
        assert "s3cret" not in result.output
    assert "VLLM_API_KEY=s3cret-key\n" in fleet["node-a"].files["/etc/vllm/secrets.env"]
    assert not any("s3cret" in command for _, command in fleet.history)
    inventory = run("debug-inventory", cluster=cluster)
    assert inventory.exit_code == 0, inventory.output
    assert "s3cret" not in inventory.output


@pytest.mark.parametrize(
    ("task", "operations"),
    [
        ("image", [row.partition(" | ")[2] for row in DEPLOY if "image.py" in row]),
        ("environment", ["Write env files and units"]),
        (
            "ray_head",
            [
                "Stop vllm serve if its group changes",
                "Start the Ray head",
                "Reach the Ray head over the fabric",
            ],
        ),
        ("ray_workers", ["Start the Ray workers", "Wait until Ray lists every node"]),
        ("serve", ["Start vllm serve", "Start the watchdog"]),
        ("verify", ["Ask for a completion"]),
        ("status", ["Read the state of every host", "Show the state"]),
        ("logs", ["Print the logs"]),
        (
            "stop",
            [
                "tasks/lock.py | Take the cluster's lock",
                "Read what runs",
                "Stop vllm serve and its watchdog",
                "Stop the Ray workers",
                "Stop the Ray head",
                "Remove our units and files",
            ],
        ),
    ],
)
def test_every_task_runs_alone(run: Pyinfra, task: str, operations: list[str]) -> None:
    run("-y", "deploy.py")
    result = run("-y", f"tasks/{task}.py")
    assert result.exit_code == 0, result.output
    assert result.operations == operations


def test_tasks_one_by_one_equal_the_deploy(run: Pyinfra, fleet: Fleet) -> None:
    for task in (
        "image",
        "model",
        "environment",
        "ray_head",
        "ray_workers",
        "serve",
        "verify",
        "keep",
    ):
        assert run("-y", f"tasks/{task}.py").exit_code == 0
    assert run("-y", "deploy.py").changes == 0


def test_restart_starts_all_anew_in_order(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    wanted = {name: dict(fleet[name].running) for name in fleet.hosts}
    del fleet.history[:]
    result = run("-y", "tasks/restart.py")
    assert result.exit_code == 0, result.output
    moves = [
        (name, command) for name, command in fleet.history if re.search("systemctl st", command)
    ]
    assert moves[0] == ("spark-1", "systemctl stop vllm-serve.service")
    assert [(name, command.split()[-1]) for name, command in moves if " start " in command] == [
        ("spark-1", "vllm-ray.service"),
        ("spark-2", "vllm-ray.service"),
        ("spark-1", "vllm-serve.service"),
    ]
    assert {name: fleet[name].running for name in fleet.hosts} == wanted


def test_stop_leaves_nothing_and_can_be_repeated(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    del fleet.history[:]
    assert run("-y", "tasks/stop.py").exit_code == 0
    assert [fleet[name].running for name in ("spark-1", "spark-2")] == [{}, {}]
    assert [fleet[name].files for name in ("spark-1", "spark-2")] == [{}, {}]
    stops = [(name, command.split()[-1]) for name, command in fleet.history if "--now" in command]
    assert stops == [
        ("spark-1", "vllm-watchdog.timer"),
        ("spark-1", "vllm-serve.service"),
        ("spark-2", "vllm-ray.service"),
        ("spark-1", "vllm-ray.service"),
    ]
    assert run("-y", "tasks/stop.py").changes == 0
    assert run("-y", "deploy.py").exit_code == 0


def test_limit_reruns_one_worker(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    result = run("-y", "tasks/ray_workers.py", "--limit", "workers")
    assert result.exit_code == 0, result.output
    assert result.commands["spark-1"] == []
    assert result.changes == 0


def test_four_hosts_start_together(
    run: Pyinfra, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_RAY_TOKEN", "x")
    monkeypatch.setenv("TEST_API_KEY", "y")
    result = run("-y", "deploy.py", cluster=CLUSTERS / "four-hosts.yaml")
    assert result.exit_code == 0, result.output
    assert result.operations == DEPLOY
    assert [fleet[name].starts for name in ("node-a", "node-b", "node-c", "node-d")] == [
        ["vllm-ray", "vllm-serve"],
        ["vllm-ray"],
        ["vllm-ray"],
        ["vllm-ray"],
    ]


def test_one_host_alone(run: Pyinfra, fleet: Fleet) -> None:
    result = run("-y", "deploy.py", cluster=CLUSTERS / "one-host.yaml")
    assert result.exit_code == 0, result.output
    assert fleet["box"].starts == ["vllm-ray", "vllm-serve"]


def test_without_ray_every_host_serves(run: Pyinfra, fleet: Fleet) -> None:
    for name in ("spark-1", "spark-2"):
        fleet[name].versions["ray"] = None
    result = run("-y", "deploy.py", cluster=CLUSTERS / "no-ray.yaml")
    assert result.exit_code == 0, result.output
    assert [fleet[name].starts for name in ("spark-1", "spark-2")] == [["vllm-serve"]] * 2
    unit = fleet["spark-2"].files["/etc/systemd/system/vllm-serve.service"]
    assert "--headless" in unit


def test_another_role_stops_what_it_no_longer_has(run: Pyinfra, fleet: Fleet) -> None:
    run("-y", "deploy.py")
    run("-y", "deploy.py", cluster=CLUSTERS / "no-ray.yaml")
    assert [sorted(fleet[name].running) for name in ("spark-1", "spark-2")] == [["vllm-serve"]] * 2
