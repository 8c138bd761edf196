"""Several environments in one run: which problem each position has, whose settings play it and give
credit to it, what is measured of each."""

import json
import random
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from statistics import pstdev
from typing import Any

import pytest
from commands import NETWORK, ludic, metrics_of, refused, summary_of
from hypothesis import given, strategies as st
from mixed_tasks import mixed
from playing import ScriptedClient, play

from ludic.errors import ConfigError
from ludic.recipes.compose import compose
from ludic.recipes.mixture import CreditByEnvironment, Mixture, build_run_algorithm, build_run_task
from ludic.runs.actors.worker import NumberedRequests
from ludic.runs.held_out import Evaluation, HeldOut, HeldOutOfEach
from ludic.runs.rollouts import RequestsByProblem, make_engine, make_training_requests
from ludic.training.credit_assignment import BatchNormalizedReturn, GroupNormalizedReturn
from ludic.training.rollouts.to_samples import batch_from_played
from ludic.types import Rollout, Step

SHARES = ["environments.one.weight={0: 1, 3: 3}", "environments.two.weight=2"]
TWO = [
    *("sort", "environments={one: {task: {args: {digits: 4}}, rollout: {group_size: 3}}, two: {task: {kind: tools}}}"),
    *("rollout.prompts=4", "rollout.group_size=2", *SHARES),
]


def rows_of(folder: Path, last: int = 30) -> Path:
    path = folder / "rows.jsonl"
    rows = [{"prompt": f"{n * 7919 % 100000}>", "completion": f"{n:03d}"} for n in range(last)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def requests_of(*settings: str) -> Any:
    recipe = compose([*TWO, *settings])
    return make_training_requests(build_run_task(recipe), recipe.rollout, seed=recipe.seed)


@cache
def two() -> tuple[Any, Any]:
    recipe = compose(TWO)
    return build_run_task(recipe), recipe


def facts(requests: Any) -> list[Any]:
    """All but the ids of groups, which the global generator draws."""
    each = [replace(request, meta={k: v for k, v in request.meta.items() if k != "group_id"}) for request in requests]
    return [asdict(request) for request in each]


@given(st.integers(0, 12))
def test_a_resumed_run_asks_for_the_same_problems_bit_for_bit(stop: int) -> None:
    task, recipe = two()
    whole, stopped, resumed = (make_training_requests(task, recipe.rollout, seed=0) for _ in range(3))
    batches = [facts(whole()) for _ in range(14)]
    assert [facts(stopped()) for _ in range(stop)] == batches[:stop]
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [facts(resumed()) for _ in range(14 - stop)] == batches[stop:]


def test_the_groups_of_each_step_follow_the_weights_of_that_step() -> None:
    """Four problems a step, first a third and from step 3 on three fifths of one: 4 of 12, then
    12 of 20."""
    requests = requests_of()
    steps = [[request.meta["environment"] for request in requests.list_problems(number)] for number in range(8)]
    assert sum(step.count("one") for step in steps[:3]) == 4
    assert sum(step.count("one") for step in steps[3:]) == 12
    expanded = requests()
    sizes = {name: {"one": 3, "two": 2}[name] for name in ("one", "two")}
    assert [each.meta["environment"] for each in expanded] == [name for name in steps[0] for _ in range(sizes[name])]


def test_an_environment_passes_through_its_own_rows_and_its_stream_depends_on_no_other(tmp_path: Path) -> None:
    rows = f"environments.rows={{data: {rows_of(tmp_path)}, reward: 'byte_rewards:mean_id'}}"
    seen: dict[str, list[str]] = {"rows": [], "one": []}
    mixed, alone = requests_of(rows), requests_of()
    for number in range(60):
        for request in mixed.list_problems(number):
            seen.setdefault(request.meta["environment"], []).append(request.meta["problem_id"])
    trained = len(set(seen["rows"]))
    assert trained == 27  # of 30 rows three are held out
    assert len(seen["rows"]) > 27
    assert sorted(seen["rows"][:trained]) == sorted(set(seen["rows"]))
    own = [each.meta["problem_id"] for n in range(9) for each in alone.list_problems(n) if each.meta["environment"] == "one"]
    assert seen["one"][: len(own)] == own


def test_changed_rows_of_an_environment_are_refused(tmp_path: Path) -> None:
    rows = f"environments.rows={{data: {rows_of(tmp_path)}, reward: 'byte_rewards:mean_id'}}"
    state = requests_of(rows).state_dict()
    rows_of(tmp_path, last=31)
    with pytest.raises(ConfigError, match=r"the data has changed"):
        requests_of(rows).load_state_dict(state)


def test_entries_of_actors_and_over_sampled_problems_are_those_of_a_run_without() -> None:
    recipe = compose([*TWO, "queue.prompts_per_entry=2", "place.actors=1"])
    entries, whole = NumberedRequests(build_run_task(recipe), recipe), requests_of()
    batches = [facts(whole()) for _ in range(5)]
    assert [facts([*entries(2 * n), *entries(2 * n + 1)]) for n in (4, 0, 3)] == [batches[n] for n in (4, 0, 3)]
    ids = [request.meta["group_id"] for number in range(4) for request in entries(number)]
    assert len(set(ids)) == 8
    by_problem = RequestsByProblem(requests_of(), 4)
    assert facts(by_problem.at(position) for position in (17, 2)) == facts(
        requests_of().list_problems(position // 4)[position % 4] for position in (17, 2)
    )


def rollouts_of(name: str, *groups: list[float]) -> list[Rollout]:
    def one(group: int, member: int, reward: float) -> Rollout:
        step = Step(index=0, prev_obs="", action="", next_obs=None, reward=reward, truncated=False, terminated=True)
        meta = {"environment": name, "request_meta": {"group_id": f"{name} {group}"}}
        return Rollout(id=f"{name} {group} {member}", steps=[step], meta=meta)

    return [one(g, m, reward) for g, rewards in enumerate(groups) for m, reward in enumerate(rewards)]


def test_rewards_are_normalised_among_those_of_their_environment() -> None:
    """Rewards 0 and 10 have mean 5 and deviation 5; 1 and 2 have 1.5 and 0.5: all are 1 away."""
    credit = CreditByEnvironment({"a": BatchNormalizedReturn(eps=0.0), "b": BatchNormalizedReturn(eps=0.0)})
    assert list(credit.compute([*rollouts_of("a", [0.0, 10.0]), *rollouts_of("b", [1.0, 2.0])]).values()) == [-1, 1, -1, 1]


def test_credit_has_the_settings_of_its_environment() -> None:
    own = ["environments.two.algorithm_args={group_normalize_adv: false}", "environments.one.algorithm_args={normalize: mean}"]
    recipe = compose([*TWO, *own])
    algorithm = build_run_algorithm(recipe, build_run_task(recipe))
    credit = algorithm.credit_assigner
    assert isinstance(credit, CreditByEnvironment)
    assert credit.assigners == {
        "one": GroupNormalizedReturn(3, normalize_adv=True, normalize="mean"),
        "two": GroupNormalizedReturn(2, normalize_adv=False),
    }
    weights = credit.compute([*rollouts_of("two", [0.0, 4.0]), *rollouts_of("one", [0.0, 0.0, 3.0])])
    assert list(weights.values()) == pytest.approx([-2, 2, -1, -1, 2])  # 3 - 1, divided by the mean 1
    recipe = compose([*TWO, "algorithm=maxent_grpo"])
    with pytest.raises(ConfigError, match=r"differ in rollout.group_size.*maxent_grpo compares"):
        build_run_algorithm(recipe, build_run_task(recipe))


MIXED = [
    *("sort", "environments={ends: {task: {args: {digits: 4}}, rollout: {system_prompt: Sort.}}}"),
    *("+environments.goes_on={task: {kind: 'mixed_tasks:Endless'}, rollout: {group_size: 2, max_new_tokens: 7}}",),
    *("rollout.prompts=4", "rollout.group_size=3", "+environments.tools={task: {kind: tools}, weight: 0}"),
]


def play_batch(*settings: str) -> tuple[Any, ScriptedClient]:
    recipe = compose([*MIXED, *settings])
    task, client = build_run_task(recipe), ScriptedClient("0123", "4")
    engine = make_engine(task, client, model_name="m", system_prompt=None, trained=True, max_retries=0)
    requests = make_training_requests(task, recipe.rollout, seed=0)()
    return play(engine.generate_rollouts(requests, task.max_turns, for_training=True)), client


def test_each_episode_is_played_with_the_settings_of_its_environment() -> None:
    played, client = play_batch()
    counted = {name: sorted({len(r.steps) for r in played if r.meta["environment"] == name}) for name in ("ends", "goes_on")}
    assert counted == {"ends": [1], "goes_on": [2]}  # of tools, whose weight is 0, an episode may have 4
    assert [sum(r.meta["environment"] == name for r in played) for name in ("ends", "goes_on")] == [2 * 3, 2 * 2]
    prompts = {request.messages[0]["role"]: request.sampling.max_tokens for request in client.requests}
    assert prompts == {"system": 6, "user": 7}


def test_metrics_of_each_environment_and_the_failures_of_one() -> None:
    played, _ = play_batch("+environments.broken={task: {kind: 'mixed_tasks:Broken'}}", "rollout.prompts=6")
    credit = CreditByEnvironment({"ends": GroupNormalizedReturn(3), "goes_on": GroupNormalizedReturn(2)})
    facts_of = batch_from_played(played, credit).meta["environments"]
    rewards = [rollout.total_reward for rollout in played if rollout.meta["environment"] == "goes_on"]
    assert facts_of["goes_on"]["rewards"] == rewards
    assert facts_of["goes_on"]["failed"] == 0
    assert facts_of["broken"] == {"rewards": [], "lengths": [], "flat": [], "failed": 2}  # the rest of a group is cancelled
    assert pstdev(rewards) >= 0


def test_each_environment_is_measured_with_its_own_problems_and_together() -> None:
    recipe = compose(
        [*MIXED, "evaluation.prompts=4", "environments.ends.evaluation.prompts=2", "evaluation.samples_per_prompt=2"]
    )
    task = build_run_task(recipe)
    assert isinstance(task, Mixture)
    del task.sources["tools"]
    right = next(iter(task.sources["ends"].task.suites().values()))[0]["answer"]

    def held_out(source: Any) -> HeldOut:
        engine = make_engine(source.task, ScriptedClient(right), model_name="m", system_prompt=None)
        return HeldOut(engine, source.task, source.recipe.evaluation, source.recipe.rollout)

    found = HeldOutOfEach({name: held_out(source) for name, source in task.sources.items()})
    measured = play(found.measure())
    assert measured.environments["ends"].sampled_reward == 0.5  # one of two problems has that answer
    assert measured.environments["goes_on"].sampled_reward == pytest.approx(0.8)  # two turns of four letters
    assert measured.sampled_reward == pytest.approx((2 * 0.5 + 4 * 0.8) / 6)
    assert measured.by_problem["sampled_reward"] == pytest.approx([1, 0, 0.8, 0.8, 0.8, 0.8])
    assert measured.num_sampled == 2 * (2 + 4)
    assert measured.interval("ends/sampled_reward") == measured.environments["ends"].interval("sampled_reward") is not None
    assert [answer.question.split(":")[0] for answer in measured.answers] == ["ends"] * 2 + ["goes_on"] * 4
    assert Evaluation.from_dict(json.loads(json.dumps(asdict(measured)))) == measured
    _, rates = play(found.eval())
    assert rates["ends/greedy_accuracy"] == 0.5
    assert rates["goes_on/num_failed_episodes"] == 0.0
    assert found.describe() == "2 held-out problems of ends, 4 held-out problems of goes_on"


def test_demonstrations_are_of_the_environments_with_a_teacher_and_have_their_system_prompts() -> None:
    recipe = compose([*MIXED, "environments.tools.weight=1"])
    shown = build_run_task(recipe).demonstrations(40, random.Random(0)) or []
    assert len(shown) == 40
    opened = [turns[0].messages for turns in shown]
    assert {messages[0]["content"] for messages in opened if messages is not None} == {"Sort."}
    assert 10 < sum(messages is None for messages in opened) < 30  # those of the tools
    nobody = build_run_task(compose([*MIXED, "environments.ends.weight=0"]))
    assert nobody.demonstrations(1, random.Random(0)) is None


TINY = [
    *("threads=1", "warmup.steps=2", "warmup.batch_size=4", "rollout.prompts=3", "rollout.group_size=4", "rollout.log_every=1"),
    *("evaluation.prompts=3", "evaluation.samples_per_prompt=2", "network.end_of_turn=newline", *NETWORK),
]


def test_a_run_reports_each_environment_in_every_step_that_has_it(tmp_path: Path) -> None:
    settings = [
        *mixed(f"{rows_of(tmp_path)}"),
        *TINY,
        "steps=4",
        f"output={tmp_path}",
        "name=run",
        "trainer.eval_every_n_steps=2",
    ]
    output = ludic("train", *settings, "callbacks.completions_every=4")
    lines = [line for line in metrics_of(tmp_path / "run") if line["phase"] == "reinforce" and "train/loss" in line]
    first, last = lines[0], lines[-1]
    assert first["train/rows/played_rollouts"] == 12
    assert not [key for key in first if key.startswith("train/two/")]
    assert last["train/rows/played_rollouts"] + last["train/two/played_rollouts"] == last["train/played_rollouts"]
    mean = sum(last[f"train/{n}/avg_sampled_reward"] * last[f"train/{n}/played_rollouts"] for n in ("rows", "two"))
    assert mean / last["train/played_rollouts"] == pytest.approx(last["train/avg_sampled_reward"])
    assert 0 <= last["train/two/odd"] <= 1
    assert last["train/two/num_failed_episodes"] == 0
    measured = next(line for line in metrics_of(tmp_path / "run") if line.get("eval/step") == 2)
    assert {"eval/rows/sampled_reward", "eval/two/sampled_reward", "eval/two/odd", "eval/rows/num_failed_episodes"} <= set(
        measured
    )
    summary = summary_of(tmp_path / "run")
    assert {"sampled_reward", "rows/sampled_reward", "two/sampled_reward"} <= set(summary["after"])
    assert "rows/sampled_reward" in summary["intervals"]["after"]
    assert "two: the digit is odd" in " ".join(output.split())
    assert "environment" in output
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert {rollout["meta"]["environment"] for rollout in rollouts} == {"rows", "two"}
    chosen = json.loads(ludic("eval", str(tmp_path / "run"), "environment=rows", f"output={tmp_path}", "--json"))
    assert chosen["task"] == "data"
    assert "environment (None) is one of rows, two" in refused("eval", str(tmp_path / "run"), f"output={tmp_path}")
