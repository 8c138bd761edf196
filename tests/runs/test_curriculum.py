"""Requests whose problems a curriculum picks: they follow from the group means of earlier batches
and from the state, in whatever order groups come; and what a run logs."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from commands import NETWORK, metrics_of, refused
from hypothesis import given

from ludic.errors import ConfigError
from ludic.recipes.build import build_curriculum, build_episodic_task
from ludic.recipes.compose import compose
from ludic.runs.curriculum import PICK, PROBLEM, CurriculumRequests
from ludic.runs.rollouts import RequestsByProblem
from ludic.types import Rollout, Step

PROMPTS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(f"{json.dumps({'prompt': f'{n * 7919 % 100000}>', 'completion': f'{n:03d}'})}\n" for n in range(10)))
    return str(path)


@cache
def parts(data: str, *settings: str) -> tuple[Any, Any, Any]:
    rows = [f"data={data}", "reward=byte_rewards:mean_id", "task.args.num_heldout=2", f"rollout.prompts={PROMPTS}"]
    recipe = compose([*rows, "rollout.group_size=2", "data.curriculum=pools", *settings])
    task = build_episodic_task(recipe)
    return recipe, task, build_curriculum(recipe, task)


def make(data: str, *settings: str) -> CurriculumRequests:
    recipe, task, policy = parts(data, *settings)
    return CurriculumRequests(task, task.problem_list, recipe.rollout, seed=recipe.seed, policy=policy)


def play(request: Any, reward: float) -> list[Rollout]:
    """A group of two whose mean reward is `reward`."""
    step = Step(index=0, prev_obs="", action="", next_obs=None, reward=reward, truncated=False, terminated=True)
    return [Rollout(id=str(member), steps=[replace(step)], meta=dict(request.meta)) for member in range(2)]


def reward_of(request: Any) -> float:
    """0, 0.5 or 1, by problem and position."""
    return Random(f"{request.meta[PICK]} {request.meta[PROBLEM]}").choice([0.0, 0.0, 0.5, 1.0])


def play_batch(requests: CurriculumRequests) -> list[int]:
    """The problems of the next batch, which is played."""
    asked = requests()[::2]
    requests.observe([rollout for request in asked for rollout in play(request, reward_of(request))])
    return [request.meta[PROBLEM] for request in asked]


@given(st.integers(0, 12))
def test_a_resumed_run_picks_the_same_problems_bit_for_bit(data: str, stop: int) -> None:
    whole, stopped, resumed = (make(data, "curriculum.args.readmit_after=3") for _ in range(3))
    picks = [play_batch(whole) for _ in range(15)]
    assert [play_batch(stopped) for _ in range(stop)] == picks[:stop]
    state = json.dumps(stopped.state_dict())
    stopped()  # a batch that is not played to its end
    resumed.load_state_dict(json.loads(state))
    assert [play_batch(resumed) for _ in range(15 - stop)] == picks[stop:]
    assert json.dumps(resumed.state_dict()) == json.dumps(whole.state_dict())
    assert [sum(problem in batch for batch in picks) for problem in range(8)] != [45 / 8] * 8


def filter_batches(
    requests: CurriculumRequests, order: Random, number: int, batches: int, state: Any = None
) -> tuple[list[list[int]], Any]:
    """(the problems taken for each batch if groups of 0 and 1 are replaced and groups come in any
    order, the state after the last one)."""
    prompts = RequestsByProblem(requests, PROMPTS)
    if state is not None:
        prompts.load_state_dict(state)
    taken: list[list[int]] = []
    for batch in range(number, batches):
        requests.begin_batch(batch, None)
        playing, accepted = [prompts.take()[1] for _ in range(PROMPTS)], 0
        picks = [request.meta[PROBLEM] for request in playing]
        while accepted < PROMPTS:
            request = playing.pop(order.randrange(len(playing)))
            requests.observe(play(request, reward_of(request)))
            if reward_of(request) == 0.5:
                accepted += 1
            else:
                playing.append(prompts.take()[1])
                picks.append(playing[-1].meta[PROBLEM])
        taken.append(picks)
    end = prompts.state_dict()
    end["curriculum"]["means"].sort()
    return taken, end


@given(st.integers(0, 2**32), st.integers(1, 3))
def test_replaced_groups_are_the_same_in_any_order_and_after_a_resume(data: str, seed: int, stop: int) -> None:
    whole, end = filter_batches(make(data), Random(0), 0, 4)
    first, state = filter_batches(make(data), Random(seed), 0, stop)
    rest, again = filter_batches(make(data), Random(seed + 1), stop, 4, json.loads(json.dumps(state)))
    assert first + rest == whole
    assert again == end


def test_problems_of_groups_in_flight_are_found_again(data: str) -> None:
    """Position 1 is still played when batch 2 is requested from block 2."""
    requests = make(data)
    prompts = RequestsByProblem(requests, PROMPTS)
    requests.begin_batch(0)
    asked = [prompts.take()[1] for _ in range(2 * PROMPTS + 1)]
    requests.begin_batch(1, 1)
    again = make(data)
    found = RequestsByProblem(again, PROMPTS)
    found.load_state_dict(json.loads(json.dumps(prompts.state_dict())))
    assert [found.at(position) for position in range(1, 7)] == asked[1:]
    assert found.take() == prompts.take()


def test_a_policy_of_ones_own_sees_the_means_and_has_arguments(data: str) -> None:
    worst = make(data, "curriculum=byte_curricula:Worst", "curriculum.args.best=true")
    picks = [play_batch(worst) for _ in range(4)]
    assert sorted(problem for batch in picks[:2] for problem in batch) == [0, 1, 2, 3, 4, 5]
    assert set(picks[2]) > {6, 7}
    assert worst.metrics == {}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (["curriculum=pool"], r"curriculum.kind \(pool\) is not known; did you mean pools.*module:Class"),
        (["curriculum=byte_curricula:None"], r"curriculum.kind \(byte_curricula:None\).*has no 'None'"),
        (["curriculum=byte_curricula:Unpicking"], r"made Unpicking; it must have pick\(seen, count"),
        (["curriculum.args.esy=1"], r"curriculum.args.esy: DifficultyPools has no such argument; did you mean easy"),
        (["curriculum=byte_curricula:Wrong"], r"picked \[8, 8, 8\]; pick must return 3 numbers from 0 to 7"),
        (["place.actors=2"], r"curriculum.kind \(pools\) does not go together with place.actors; .*rewards"),
        (["curriculum.kind=null", "curriculum.args.easy=1"], r"curriculum.args .* needs curriculum.kind; set that too"),
    ],
)
def test_wrong_settings_are_refused_with_the_rule(data: str, settings: list[str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        make(data, *settings)()


def test_a_task_without_a_list_of_problems_is_refused() -> None:
    said = refused("train", "sort", "curriculum=pools")
    assert "curriculum.kind (pools)" in said
    assert "task.kind (sort)" in said
    assert "set data=FILE" in said


def test_a_checkpoint_without_curriculum_is_refused(data: str) -> None:
    state = make(data).state_dict()
    del state["curriculum"]
    with pytest.raises(ConfigError, match=r"resume with curriculum\.kind=null"):
        make(data).load_state_dict(state)


@pytest.mark.integration
def test_a_run_logs_its_pools(tmp_path: Path, data: str) -> None:
    from typer.testing import CliRunner

    from ludic.cli.app import app

    tiny = [
        "threads=1",
        "warmup.steps=1",
        "warmup.batch_size=4",
        "steps=4",
        "rollout.prompts=4",
        "rollout.group_size=2",
        *NETWORK,
    ]
    rows = [f"data={data}", "reward=byte_rewards:mean_id", "task.args={max_new_tokens: 4, num_heldout: 2}"]
    shares = ["data.curriculum=pools", "curriculum.args={easy: 0.35, hard: 0.25, retire_after: 1, readmit_after: 2}"]
    result = CliRunner().invoke(app, ["train", *tiny, *rows, *shares, "evaluation.prompts=2", f"output={tmp_path}", "name=run"])
    assert result.exit_code == 0, result.output
    lines = [line for line in metrics_of(tmp_path / "run") if line["phase"] == "reinforce" and "train/loss" in line]
    assert [line["groups/unseen"] for line in lines] == [8, 4, 0, 0]
    assert [sum(line[f"groups/{name}"] for name in ("easy", "fit", "hard", "retired", "unseen")) for line in lines] == [8] * 4
    picked = ("easy", "fit", "hard", "retired", "unseen")
    assert all(sum(line[f"groups/picked_{name}"] for name in picked) == 1 for line in lines)
