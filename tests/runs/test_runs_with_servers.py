"""Runs whose servers, actors and trainer are killed are the undisturbed run. The servers are stubs
that hold the policy and sample from it (`policy_vllm`)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_vllm
import policy_vllm
import pytest
from commands import NETWORK, metrics_of, same_weights
from ray_namespace import run_in_namespace

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("runs with servers")]  # they share a run
SUPPORT = Path(__file__).parents[1] / "support"
STEPS = 8


def settings(folder: Path, *more: str) -> list[str]:
    """A run in which every step changes the weights."""
    folder.mkdir(exist_ok=True, parents=True)
    python = fake_vllm.install(folder / "venv", cpu=False, script=policy_vllm.__file__)
    rows = folder / "rows.jsonl"
    problems = [{"prompt": f"{n * 7919 % 100000}>", "completion": f"{n:03d}"} for n in range(30)]
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in problems))
    return [
        *("train", f"data={rows}", "reward=byte_rewards:mean_id", "task.args.max_new_tokens=4", "task.args.num_heldout=3"),
        *("threads=1", "warmup.steps=2", "warmup.batch_size=4", f"steps={STEPS}", "rollout.prompts=4", "rollout.group_size=4"),
        *("rollout.log_every=1", "evaluation.prompts=3", "evaluation.samples_per_prompt=2", *NETWORK),
        *("checkpoint.every_n_steps=3", "trainer.lr=3e-3", f"inference.python={python}"),
        *("trainer.model_device=cpu", "place.servers=1", f"output={folder}", "name=run", *more),
    ]


def killed_launch(folder: Path, kills: str, *more: str) -> tuple[list[str], dict[str, str]]:
    """The command that plays such a run and kills processes of it, and its environment. Answers of
    servers are lines of the file `sampled`."""
    command = [sys.executable, str(SUPPORT / "killed_launch.py"), str(folder / "run"), kills, *settings(folder, *more)]
    path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))
    return command, {"PYTHONPATH": path, "SAMPLED": str(folder / "sampled")}


ACTOR = ["place.actors=1", "queue.lease_s=2"]


def play(folder: Path, kills: str = "", *more: str) -> Path:
    """The run on this machine."""
    command, variables = killed_launch(folder, kills, *more)
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def trained_on(run: Path) -> list[tuple[Any, ...]]:
    """Step, loss, gradient norm and lag of each step."""
    names = ("phase", "step", "train/loss", "train/grad_norm", "train/policy_lag")
    return [tuple(line.get(name) for name in names) for line in metrics_of(run)]


def assert_is_the_run(run: Path, whole: Path) -> None:
    assert same_weights(run, whole)
    assert trained_on(run) == trained_on(whole)


def answers_of(run: Path) -> dict[str, set[str]]:
    """Version -> fingerprints of the weights that servers answered with under it."""
    answers: dict[str, set[str]] = {}
    for line in (run.parent / "sampled").read_text().splitlines():
        version, _, weights = line.partition(" ")
        answers.setdefault(version, set()).add(weights)
    return answers


def restarted(run: Path) -> list[str]:
    events = (json.loads(line) for line in (run / "events.jsonl").read_text().splitlines())
    return [event["name"] for event in events if event["event"] == "restart"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One actor and one server, undisturbed, on this machine."""
    run = play(tmp_path_factory.mktemp("whole"), "", *ACTOR)
    assert restarted(run) == []
    losses = {line["train/grad_norm"] for line in metrics_of(run) if line["phase"] == "reinforce"}
    assert len(losses) == STEPS  # it learns, so that a difference would show
    return run


def test_each_version_is_served_and_one_set_of_weights_has_its_name(whole: Path) -> None:
    answers = answers_of(whole)
    assert set(answers) - {"default"} == {str(step) for step in range(STEPS)}
    assert all(len(weights) == 1 for weights in answers.values())
    assert {line.get("train/policy_lag", 0.0) for line in metrics_of(whole)} == {0.0}
    states = {process["name"]: process["state"] for process in json.loads((whole / "launch.json").read_text())["processes"]}
    assert states == {"trainer": "ended", "server0": "ended", "actor0": "ended"}
    assert not list((whole / "servers").glob("*.json"))


def test_servers_answer_the_held_out_problems_too(whole: Path, tmp_path: Path) -> None:
    """With the weights of each measurement, and without a change of what is trained."""
    run = play(tmp_path, "", "evaluation.on=servers", "trainer.eval_every_n_steps=4")
    assert same_weights(run, whole)
    answers = answers_of(run)
    assert set(answers) - {"default"} == {str(step) for step in range(STEPS + 1)}
    assert all(len(weights) == 1 for weights in answers.values())
    versions = [line.split()[0] for line in (run.parent / "sampled").read_text().splitlines()]
    measured = 3 * (2 + 1)  # two sampled answers to each problem, and a greedy one
    assert versions.count(str(STEPS)) == 2 * measured  # the evaluation of the last step, and the one after training
    assert versions.count("4") == versions.count("3") + measured
    assert versions.count("0") == versions.count("3") + measured
    assert [line["step"] for line in metrics_of(run) if "eval/sampled_reward" in line] == [4, 8]


def test_a_run_that_pushes_adapters_is_the_undisturbed_run_after_kills(tmp_path: Path) -> None:
    """Each version is one set of adapters, whoever was killed; the base model is never sampled
    from."""
    more = [*ACTOR, "lora.rank=4", "trainer.lr=3e-2"]
    whole = play(tmp_path / "whole", "", *more)
    command, variables = killed_launch(tmp_path / "killed", "server0@2,trainer@5", *more)
    run, env = tmp_path / "killed" / "run", {**os.environ, **variables}
    assert subprocess.run(command, env=env, capture_output=True, timeout=300).returncode == 256 - signal.SIGKILL
    resume = [sys.executable, "-m", "ludic.cli", "train", "--resume", str(run)]
    done = subprocess.run(resume, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_is_the_run(run, whole)
    assert restarted(run) == ["server0"]
    for each in (whole, run):
        answers = answers_of(each)
        assert set(answers) == {str(step) for step in range(STEPS)}
        assert all(len(weights) == 1 for weights in answers.values())
    assert len({next(iter(weights)) for weights in answers.values()}) == STEPS  # it learns


def test_on_ray_a_server_an_actor_and_the_trainer_are_killed(whole: Path, tmp_path: Path) -> None:
    cpus = [f"place.{role}_cpus=0.3" for role in ("trainer", "actor", "server")]
    command, variables = killed_launch(
        tmp_path, "server0@2,actor0@4,trainer@6", "place=ray", "place.address=local", *ACTOR, *cpus
    )
    done = run_in_namespace(command, tmp_path, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run"
    assert_is_the_run(run, whole)
    assert restarted(run) == ["server0", "actor0", "trainer"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[*ACTOR, "place.servers=2"], []], ids=["two servers", "without actors"])
def test_a_run_whose_servers_are_killed_is_the_undisturbed_run(whole: Path, tmp_path: Path, more: list[str]) -> None:
    run = play(tmp_path, "server0@2,server0@5", *more)
    assert_is_the_run(run, whole)
    assert restarted(run) == ["server0", "server0"]
