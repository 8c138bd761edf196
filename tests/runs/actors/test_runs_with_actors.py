"""Runs with actors are the same bit for bit, however many there are and whatever is killed."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from commands import NETWORK, metrics_of, refused, same_weights, summary_of
from forked_run import Forked, wait_for_step, wait_until_exists
from ray_namespace import run_in_namespace

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("runs with actors")]  # they share a run
SUPPORT = Path(__file__).parents[2] / "support"
STEPS = 10
BY_HAND = "queue.url=queue.sqlite"


def settings(folder: Path, *more: str) -> list[str]:
    """A run in which every step changes the weights."""
    rows = folder / "rows.jsonl"
    problems = [{"prompt": f"{n * 7919 % 100000}>", "completion": f"{n:03d}"} for n in range(30)]
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in problems))
    return [
        *("train", f"data={rows}", "reward=byte_rewards:mean_id", "task.args.max_new_tokens=4", "task.args.num_heldout=3"),
        *("threads=1", "warmup.steps=2", "warmup.batch_size=4", f"steps={STEPS}", "rollout.prompts=4", "rollout.group_size=4"),
        *("rollout.log_every=1", "evaluation.prompts=3", "evaluation.samples_per_prompt=2", *NETWORK),
        *("checkpoint.every_n_steps=3", "trainer.lr=3e-3", "queue.lease_s=2", f"output={folder}", "name=run", *more),
    ]


def play(folder: Path, *more: str, actors: int = 1) -> Path:
    """A run that nothing disturbs."""
    folder.mkdir(exist_ok=True)
    run = folder / "run"
    with ExitStack() as running:
        trainer = running.enter_context(Forked(*settings(folder, *more)))
        wait_until_exists(run / "run_id")
        started = [running.enter_context(Forked("worker", "actor", run, "--name", f"actor{i}")) for i in range(actors)]
        assert trainer.end() == 0
        assert [actor.end() for actor in started] == [0] * actors
    return run


def trained_on(run: Path) -> list[tuple[Any, ...]]:
    """Step, loss and gradient norm of each line of metrics.jsonl."""
    return [(line["phase"], line.get("step"), line.get("train/loss"), line.get("train/grad_norm")) for line in metrics_of(run)]


def episodes_of(run: Path) -> list[Any]:
    lines = (json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines())
    names = ("problem_id", "group_id", "episode_idx", "policy_version")
    return [([line["meta"][name] for name in names], line["total_reward"], line["steps"][0]["action"]) for line in lines]


def assert_is_the_run(run: Path, whole: Path) -> None:
    assert same_weights(run, whole)
    assert trained_on(run) == trained_on(whole)
    assert episodes_of(run) == episodes_of(whole)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One actor, a batch ahead, undisturbed."""
    run = play(tmp_path_factory.mktemp("whole"), BY_HAND, "inference.batches_ahead=1")
    losses = {line["train/grad_norm"] for line in metrics_of(run) if line["phase"] == "reinforce"}
    assert len(losses) == STEPS  # it learns, so that a difference would show
    return run


def test_a_run_whose_actor_and_trainer_are_killed_is_the_undisturbed_run(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ExitStack() as running:
        trainer = running.enter_context(Forked(*settings(tmp_path, BY_HAND, "inference.batches_ahead=1")))
        wait_until_exists(run / "run_id")
        first, second = (running.enter_context(Forked("worker", "actor", run, "--name", name)) for name in ("first", "second"))
        wait_for_step(run, 2, trainer)
        first.kill()
        wait_for_step(run, 5, trainer, second)
        trainer.kill()
        third = running.enter_context(Forked("worker", "actor", run, "--name", "third"))
        resumed = running.enter_context(Forked("train", "--resume", run))
        assert resumed.end() == 0
        assert [second.end(), third.end()] == [0, 0]
    assert_is_the_run(run, whole)
    lags = [line["train/policy_lag"] for line in metrics_of(run) if "train/policy_lag" in line]
    assert lags == [0.0] + [1.0] * (STEPS - 1)


@pytest.mark.parametrize("ahead", [0, 1])
def test_one_actor_that_samples_whole_batches_gives_the_run_without_actors(tmp_path: Path, ahead: int) -> None:
    alone, actors = (tmp_path / name for name in ("alone", "actors"))
    ahead_of = f"inference.batches_ahead={ahead}"
    actors.mkdir()
    alone.mkdir()
    with Forked(*[given for given in settings(alone, ahead_of) if not given.startswith("queue.")]) as trainer:
        assert trainer.end() == 0
    run = play(actors, BY_HAND, ahead_of, "queue.prompts_per_entry=4")
    assert same_weights(run, alone / "run")
    assert trained_on(run) == trained_on(alone / "run")


def test_a_run_through_a_redis_server_is_the_run_through_a_file(whole: Path, tmp_path: Path, redis_server: Any) -> None:
    run = play(tmp_path, f"queue.url={redis_server.url}", "inference.batches_ahead=1", actors=2)
    assert_is_the_run(run, whole)
    assert not (run / "queue.sqlite").exists()


def test_the_supervised_actors_of_a_run_give_the_same_run_and_one_that_is_killed_is_restarted(
    whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, "-m", "ludic.cli", *settings(tmp_path, "place.actors=2", "inference.batches_ahead=1")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as trainer:
        wait_for_step(run, 2)
        launch = json.loads((run / "launch.json").read_text())
        pids = {process["name"]: process["pid"] for process in launch["processes"]}
        assert pids["trainer"] == trainer.pid
        os.kill(pids["actor1"], signal.SIGKILL)
        assert trainer.wait(timeout=240) == 0
    assert_is_the_run(run, whole)
    assert summary_of(run)["actors"]["restarts"] <= 1  # the run may end before the new process is there
    ends = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert any(event["event"] == "end" and event["name"] == "actor1" and event["signal"] == signal.SIGKILL for event in ends)


@pytest.mark.parametrize("kills", ["", pytest.param("actor0@2,trainer@5", marks=pytest.mark.slow)], ids=["undisturbed", "killed"])
def test_a_run_on_ray_is_the_run_on_this_machine(whole: Path, tmp_path: Path, kills: str) -> None:
    place = ["place=ray", "place.address=local", "actors=1", "place.trainer_cpus=0.5", "place.actor_cpus=0.5"]
    arguments = settings(tmp_path, *place, "inference.batches_ahead=1")
    run = tmp_path / "run"
    environment = {"PYTHONPATH": str(SUPPORT)}
    done = run_in_namespace(
        [sys.executable, str(SUPPORT / "killed_launch.py"), str(run), kills, *arguments], tmp_path, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_is_the_run(run, whole)
    ends = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["name"] for event in ends if event["event"] == "restart"] == [
        kill.partition("@")[0] for kill in kills.split(",") if kill
    ]
    launch = json.loads((run / "launch.json").read_text())
    assert (launch["place"], launch["exit_status"]) == ("ray", 0)


def test_a_stopped_run_leaves_no_actor_and_resumes(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ExitStack() as running:
        trainer = running.enter_context(Forked(*settings(tmp_path, BY_HAND, "inference.batches_ahead=1")))
        wait_until_exists(run / "run_id")
        actor = running.enter_context(Forked("worker", "actor", run))
        wait_for_step(run, 4, trainer)
        assert trainer.end(signal.SIGTERM) == 128 + signal.SIGTERM
        assert actor.is_running  # by hand: it waits for the trainer to come back
        assert running.enter_context(Forked("train", "--resume", run)).end() == 0
        assert actor.end() == 0
    assert_is_the_run(run, whole)
    assert "the run began with queue.sqlite" in refused_with(
        run, ("url: queue.sqlite", "url: null"), ("lease_s: 2.0", "lease_s: 60.0")
    )
    assert re.search("queue\\.order is arrival, .*began with exact", refused_with(run, ("order: exact", "order: arrival")))


def refused_with(run: Path, *changes: tuple[str, str]) -> str:
    config = run / "config.yaml"
    before = text = config.read_text()
    for setting, changed in changes:
        assert setting in text
        text = text.replace(setting, changed)
    config.write_text(text)
    try:
        return refused("train", "--resume", str(run))
    finally:
        config.write_text(before)
