"""A task made of a data set and rewards: the held-out split, the order of problems, and settings
that are refused before anything runs."""

import asyncio
import json
import re
from collections import Counter
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ludic.errors import ConfigError, DataError
from ludic.recipes.build import build_task
from ludic.recipes.compose import compose
from ludic.recipes.schema import TaskSection
from ludic.runs.rollouts import PassRequests
from ludic.tasks import as_episodic
from ludic.tasks.data_task import DataTask, TaskData
from ludic.tasks.rewards import build_rewards


def one(completions, **columns):
    """The tests name it as `<this module>:one`."""
    return [1.0] * len(completions)


def half(completions, answer, **columns):
    return [0.5] * len(completions)


def strict_in_training(completions, is_eval):
    return [1.0 if is_eval else 0.0] * len(completions)


class Judge:
    """Not a function."""


NUMBER = 3
ONE, HALF = f"{__name__}:one", f"{__name__}:half"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_numbered(path, count=40):
    return write(path, [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(count)])


def prompts(problems):
    return [problem["question"] for problem in problems]


def test_a_tenth_is_held_out_and_the_rest_is_for_training(tmp_path):
    task = DataTask(write_numbered(tmp_path / "p.jsonl"), ONE)
    assert len(task.heldout()) == 4
    assert sorted(prompts([*task.heldout(), *task.training])) == sorted(f"{n}+1=" for n in range(40))
    assert task.heldout()[0]["answer"] == str(int(task.heldout()[0]["question"][:-3]) + 1)
    assert {task.draw(Random(n))["id"] for n in range(300)} == {problem["id"] for problem in task.training}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(order=st.permutations(range(12)), repeats=st.lists(st.integers(0, 11), max_size=8), wanted=st.integers(1, 5))
def test_the_held_out_split_does_not_depend_on_row_order_and_is_never_trained_on(tmp_path, order, repeats, wanted):
    rows = [{"prompt": f"{n}?", "answer": n} for n in [*order, *repeats]]
    task = DataTask(TaskData(write(tmp_path / "p.jsonl", rows), num_heldout=wanted), ONE)
    rows = [{"prompt": f"{n}?", "answer": n} for n in range(12)]
    plain = DataTask(TaskData(write(tmp_path / "q.jsonl", rows), num_heldout=wanted), ONE)
    assert prompts(task.heldout()) == prompts(plain.heldout())
    assert len(task.heldout()) == wanted
    assert not set(prompts(task.training)) & set(prompts(task.heldout()))
    left = [prompt for prompt in (f"{n}?" for n in [*order, *repeats]) if prompt not in prompts(plain.heldout())]
    assert Counter(prompts(task.training)) == Counter(left)


def test_without_rows_to_train_on_every_problem_of_the_held_out_data_is_measured_in_its_order(tmp_path):
    held = write_numbered(tmp_path / "held.jsonl", 5)
    task = DataTask(TaskData(heldout_data=held), ONE)
    assert prompts(task.heldout()) == [f"{n}+1=" for n in range(5)]
    assert [problem["id"] for problem in task.heldout()] == ["0", "1", "2", "3", "4"]
    assert task.training == []
    assert len(DataTask(TaskData(heldout_data=held, num_heldout=2), ONE).heldout()) == 2
    assert len(DataTask(TaskData(heldout_data=held, streaming=True), ONE).heldout()) == 5
    with pytest.raises(ConfigError, match="needs data=FILE and reward=MODULE:FUNCTION"):
        DataTask(TaskData(heldout_split="test"), ONE)


def test_a_separate_held_out_file_removes_its_prompts_from_training(tmp_path):
    held = write(tmp_path / "t.jsonl", [{"prompt": "0+1=", "answer": "1"}, {"prompt": "new", "answer": "x"}])
    task = DataTask(TaskData(write_numbered(tmp_path / "p.jsonl", 3), heldout_data=held), ONE)
    assert (prompts(task.heldout()), prompts(task.training)) == (["0+1=", "new"], ["1+1=", "2+1="])
    assert not {problem["id"] for problem in task.heldout()} & {problem["id"] for problem in task.training}


def test_the_prompt_column_can_have_any_of_its_usual_names(tmp_path):
    for name in ("question", "problem", "instruction"):
        task = DataTask(write(tmp_path / "p.jsonl", [{name: "a", "x": 1}, {name: "b", "x": 2}]), ONE)
        assert {*prompts(task.heldout()), *prompts(task.training)} == {"a", "b"}
    task = DataTask(
        TaskData(write(tmp_path / "p.jsonl", [{"q": "a", "prompt": "c"}, {"q": "b", "prompt": "d"}]), prompt_column="q"), ONE
    )
    assert {*prompts(task.heldout()), *prompts(task.training)} == {"a", "b"}


def test_the_answer_can_be_in_a_column_of_any_name(tmp_path):
    source = write(tmp_path / "p.jsonl", [{"prompt": "a", "final": "1"}, {"prompt": "b", "final": "2"}])
    task = DataTask(TaskData(source, answer_column="final"), ONE)
    assert sorted(problem["row"]["answer"] for problem in [*task.heldout(), *task.training]) == ["1", "2"]


def test_conversations_are_prompted_as_a_whole(tmp_path):
    chat = [[{"role": "system", "content": "S"}, {"role": "user", "content": text}] for text in "ab"]
    task = DataTask(write(tmp_path / "p.jsonl", [{"prompt": messages} for messages in chat]), ONE)
    problem = task.training[0]
    obs, info = task.make_env(problem).env_reset()
    assert (obs, info) == (problem["question"], {"messages": problem["row"]["prompt"]})


def requests_of(task, batches, seed=0, prompts_a_batch=3):
    section = compose(["data", f"rollout.prompts={prompts_a_batch}", "rollout.group_size=2"]).rollout
    return PassRequests(as_episodic(task), task, section, seed=seed)


def draw_prompts(requests, batches):
    return [[request.meta["problem_id"] for request in requests()] for _ in range(batches)]


def test_every_problem_is_sampled_once_before_any_repeats(tmp_path):
    task = DataTask(write_numbered(tmp_path / "p.jsonl", 11), ONE)  # 10 training problems: 3 + 1/3 batches
    flat = [group for batch in draw_prompts(requests_of(task, 0), 10) for group in batch[::2]]
    passes = [flat[i : i + 10] for i in (0, 10, 20)]
    assert all(set(one_pass) == {problem["id"] for problem in task.training} for one_pass in passes)
    assert passes[0] != passes[1]
    assert (
        draw_prompts(requests_of(task, 0), 4)
        == draw_prompts(requests_of(task, 0), 4)
        != draw_prompts(requests_of(task, 0, seed=1), 4)
    )


def test_a_resumed_run_continues_at_its_position_and_refuses_other_data(tmp_path):
    task = DataTask(write_numbered(tmp_path / "p.jsonl", 11), ONE)
    whole, first, second = (requests_of(task, 0) for _ in range(3))
    expected = draw_prompts(whole, 6)
    assert draw_prompts(first, 4) == expected[:4]
    second.load_state_dict(first.state_dict())
    assert draw_prompts(second, 2) == expected[4:]
    assert task.scorer.trainer_state.global_step == 5
    other = DataTask(write_numbered(tmp_path / "p.jsonl", 12), ONE)
    with pytest.raises(ConfigError, match="the data has changed"):
        requests_of(other, 0).load_state_dict(first.state_dict())


def test_completions_in_the_data_become_demonstrations(tmp_path):
    rows = [{"prompt": "a", "completion": "A"}, {"prompt": "b", "completion": "B"}]
    task = DataTask(write(tmp_path / "p.jsonl", rows), ONE)
    problem = task.training[0]
    assert task.demonstrate(problem, Random(0)) == problem["question"].upper()
    bare = DataTask(write_numbered(tmp_path / "q.jsonl"), ONE)
    with pytest.raises(ConfigError, match="a warm-up needs a column `completion`"):
        bare.demonstrate(bare.training[0], Random(0))


def test_the_results_of_several_functions_are_reported_by_name(tmp_path):
    source = write_numbered(tmp_path / "p.jsonl")
    assert DataTask(source, ONE).measures == {}
    task = DataTask(source, [ONE, HALF], [1, 0.2])
    assert list(task.measures) == ["rewards/one", "rewards/half"]
    assert "one + 0.2 * half" in task.reward_sees
    measured = DataTask(source, ONE, eval_reward=HALF)
    assert re.search("half .*whole answer, .*in training .*one", measured.reward_sees)
    judged = DataTask(source, judged=True, eval_reward=HALF)
    assert judged.reward_sees.startswith("what half returned")
    assert "training" not in judged.reward_sees


@pytest.mark.parametrize(
    ("reward", "weights", "names", "numbers"),
    [
        (ONE, None, ["one"], [1.0]),
        (ONE, 2, ["one"], [2.0]),
        ([ONE, "gsm8k"], [1, 0.5], ["one", "gsm8k"], [1.0, 0.5]),
        ({ONE: 1.0, "math": 0.25}, None, ["one", "math"], [1.0, 0.25]),
    ],
)
def test_rewards_can_be_a_name_a_list_or_names_with_weights(reward, weights, names, numbers):
    built = build_rewards(reward, weights, timeout_s=1)
    assert (built.names, built.weights) == (names, numbers)


@pytest.mark.parametrize(
    ("reward", "weights", "message"),
    [
        ("gms8k", None, r"reward \(gms8k\) must be .*; did you mean gsm8k\?"),
        (
            "exact",
            None,
            r"\(exact\) must be module:function or one of code, code_partial, gsm8k, ifeval, ifeval_instructions, judge, math, pure_",
        ),
        (["code", "math"], None, r"reward \(code\) runs programs and must be the only"),
        (f"{__name__}:NUMBER", None, r"is int, not a function"),
        (f"{__name__}:Judge", None, r"is a class, not a function"),
        ([], None, r"reward \(\[\]\) must be module:function"),
        (3, None, r"reward \(3\) must be module:function"),
        ([ONE], [1, 2], r"2 weights for 1 reward functions"),
        ([ONE], ["a"], r"reward_weights \(\['a'\]\) .*list of numbers"),
        ({ONE: 1.0}, [1.0], r"has weights of its own"),
    ],
)
def test_the_error_of_an_invalid_reward_has_a_remedy(reward, weights, message):
    with pytest.raises(ConfigError, match=message):
        build_rewards(reward, weights, timeout_s=1)


def play(task, engine_scorer):
    """The reward of one answer to the first held-out problem, and its measures."""
    [[problem, *_]] = task.suites().values()
    step = SimpleNamespace(action="x", reward=0.0, info={"row": problem["row"]}, next_obs=None, trace=None)
    rollout = SimpleNamespace(id="r", steps=[step], meta={})
    assert asyncio.run(engine_scorer.score([rollout])) == {}
    return step.reward, {name for name in step.info if name.startswith("rewards/")}


def test_held_out_answers_are_rewarded_by_functions_of_their_own(tmp_path):
    source = write_numbered(tmp_path / "p.jsonl")
    own = as_episodic(DataTask(source, ONE, eval_reward=[ONE, HALF], eval_reward_weights=[1, 4]))
    assert play(own, own.training_scorer) == (1.0, {"rewards/one"})
    assert play(own, own.scorer) == (3.0, {"rewards/one", "rewards/half"})
    assert (list(own.rates), list(own.measures)) == (["rewards/one", "rewards/half"],) * 2
    several = as_episodic(DataTask(source, [ONE, HALF], eval_reward=ONE))
    assert (list(several.rates), list(several.measures)) == ([], ["rewards/one", "rewards/half"])


def test_without_an_eval_reward_the_functions_are_told_what_is_measured(tmp_path):
    task = as_episodic(DataTask(write_numbered(tmp_path / "p.jsonl"), f"{__name__}:strict_in_training"))
    assert play(task, task.training_scorer)[0] == 0.0
    assert play(task, task.scorer)[0] == 1.0


@pytest.mark.parametrize(("eval_reward", "success"), [("pure_accuracy_math", 1.0), (ONE, None), (None, None)])
def test_held_out_accuracy_is_defined_by_the_reward_of_held_out_answers(tmp_path, eval_reward, success):
    task = DataTask(write_numbered(tmp_path / "p.jsonl"), ONE, eval_reward=eval_reward)
    assert task.success_reward == success


def test_weights_for_no_eval_reward_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="set eval_reward too"):
        DataTask(write_numbered(tmp_path / "p.jsonl"), ONE, eval_reward_weights=[1.0])
    with pytest.raises(ConfigError, match=r"eval_reward \(gms8k\) must be .*; did you mean gsm8k"):
        DataTask(write_numbered(tmp_path / "p.jsonl"), ONE, eval_reward="gms8k")


def test_incompatible_settings_are_refused_when_the_task_is_built(tmp_path):
    source = write_numbered(tmp_path / "p.jsonl")
    with pytest.raises(ConfigError, match="needs data=FILE and reward=MODULE:FUNCTION"):
        DataTask(source)
    with pytest.raises(ConfigError, match=r"half asks for answer, .*does not have"):
        DataTask(write(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), HALF)
    same = write(tmp_path / "same.jsonl", [{"prompt": "a", "right": "1"}] * 5)
    with pytest.raises(ConfigError, match=r"same\.jsonl needs two prompts .*\(rows: 5\)"):
        DataTask(same, ONE)
    assert DataTask(TaskData(same, heldout_data=source), ONE)
    with pytest.raises(ConfigError, match=r"num_heldout \(40\) must be .* at most 39"):
        DataTask(TaskData(source, num_heldout=40), ONE)
    with pytest.raises(ConfigError, match=r"every prompt of .* is held out"):
        DataTask(TaskData(source, heldout_data=source), ONE)
    with pytest.raises(DataError, match=r"p\.jsonl, line 1: .*'1' .*number after ####"):
        DataTask(source, "gsm8k")
    with pytest.raises(ConfigError, match=r"task\.args\.num_held: .*did you mean num_heldout\?"):
        build_task(TaskSection(kind="data", args={"num_held": 3}), data=source, reward=ONE)
    with pytest.raises(ConfigError, match=r"data, reward .*task\.kind \(sort\)"):
        build_task(TaskSection(kind="sort"), data=source)


def test_a_verifier_suggests_its_system_prompt(tmp_path):
    rows = [{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(3)]
    task = DataTask(write(tmp_path / "p.jsonl", rows), [ONE, "gsm8k"])
    assert "\\boxed" in task.make_env(task.training[0]).suggested_sysprompt
    assert DataTask(write_numbered(tmp_path / "q.jsonl"), ONE).system_prompt is None


def test_settings_of_the_users_own_problem_select_its_recipe(tmp_path):
    assert compose(["data=p.jsonl", f"reward={ONE}"]).recipe == "data"
    recipe = compose(["data=p.jsonl", f"reward=[{ONE},math]", "reward_weights=[1,0.5]", "model=m"])
    assert (recipe.task.kind, recipe.reward, recipe.reward_weights) == ("data", [ONE, "math"], [1, 0.5])
    assert (recipe.warmup.steps, recipe.trainer.lr) == (0, 5e-6)
    path = tmp_path / "mine.yaml"
    path.write_text(f"data: p.jsonl\nreward: {{'{ONE}': 1.0, math: 0.5}}\n")
    assert compose([str(path)]).reward == {ONE: 1.0, "math": 0.5}
    assert compose([str(path)]).recipe == "data"
    assert compose([]).data is None


async def test_the_rewards_of_a_task_come_from_its_scorer(tmp_path):
    """As `ludic train` plays: the environment of the task, then its scorer."""
    from ludic.types import Rollout, Step

    task = DataTask(write_numbered(tmp_path / "p.jsonl"), [ONE, HALF], [1, 0.2])
    env = task.make_env(task.training[0])
    env.env_reset()
    outcome = env.env_step("x")
    rollout = Rollout(steps=[Step(0, "q", "x", None, outcome.reward, False, True, outcome.info)])
    assert await task.scorer.score([rollout]) == {}
    assert rollout.total_reward == pytest.approx(1.1)
