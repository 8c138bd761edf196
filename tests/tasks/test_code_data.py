"""Problems of a file, whose answers are judged by running their programs."""

import asyncio
import json
from random import Random

import pytest
from fake_sandboxes import FakePool

from ludic.errors import ConfigError, DataError
from ludic.recipes.build import build_task
from ludic.recipes.schema import TaskSection
from ludic.tasks.code import CodeData
from ludic.tasks.data_task import TaskData

ROWS = [
    {"question": f"Print {n}.", "inputs": ["", ""], "outputs": [str(n), str(n % 2)], "solutions": [f"print({n})"]}
    for n in range(12)
]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return str(path)


def play(task, problem, answer):
    """`answer` is what the scripted sandbox prints."""

    async def main():
        env = task.make_env(problem)
        observation, _ = await env.env_reset()
        assert observation == problem["question"]
        return await env.env_step(answer)

    return asyncio.run(main())


def test_the_last_block_of_an_answer_is_judged(data):
    task = CodeData(TaskData(data, num_heldout=3), pool=FakePool(1))
    problem = next(one for one in [*task.training, *task.heldout()] if one["question"] == "Print 1.")
    assert play(task, problem, "So:\n```python\n2\n```\nno:\n```python\n1\n```").reward == 1.0
    assert play(task, problem, "```python\n2\n```").reward == 0.0
    none = play(task, problem, "1")
    assert (none.reward, none.info["compiled"]) == (0.0, False)


def test_partial_credit_is_the_share_of_the_tests(data):
    task = CodeData(TaskData(data, num_heldout=3), pool=FakePool(1), partial_credit=True)
    problem = next(one for one in [*task.training, *task.heldout()] if one["question"] == "Print 3.")
    outcome = play(task, problem, "```\n3\n```")
    assert (outcome.reward, outcome.info["compiled"]) == (0.5, True)


def test_problems_are_held_out_whatever_their_order(data, tmp_path):
    one = CodeData(TaskData(data, num_heldout=4), pool=FakePool(1))
    path = tmp_path / "reversed.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS[::-1]))
    other = CodeData(TaskData(str(path), num_heldout=4), pool=FakePool(1))
    held = [{problem["question"] for problem in task.heldout()} for task in (one, other)]
    assert held[0] == held[1]
    assert len(held[0]) == 4
    assert not held[0] & {problem["question"] for problem in one.training}
    assert one.digest != other.digest


def test_a_file_of_its_own_is_held_out(data, tmp_path):
    path = tmp_path / "heldout.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n")
    task = CodeData(TaskData(data, heldout_data=str(path)), pool=FakePool(1))
    assert [problem["question"] for problem in task.heldout()] == ["Print 0."]
    assert len(task.training) == 11


def test_problems_that_cannot_be_judged_are_left_out_and_logged(tmp_path, caplog):
    path = tmp_path / "problems.jsonl"
    bad = {"question": "Bad.", "tests": ["assert f(1) == g(1)"]}
    path.write_text("".join(f"{json.dumps(row)}\n" for row in [*ROWS, bad]))
    task = CodeData(TaskData(str(path), num_heldout=1), pool=FakePool(1))
    assert len(task.training) == 11
    assert "1 of 13 problems" in caplog.text
    assert "line 13: `assert f(1) == g(1)`" in caplog.text
    path.write_text(json.dumps(bad))
    with pytest.raises(DataError, match=r"no problem .*judged.*not written out"):
        CodeData(str(path), pool=FakePool(1))


def test_a_folder_of_a_data_set_is_read(tmp_path):
    from datasets import Dataset

    Dataset.from_list(ROWS).to_parquet(str(tmp_path / "train.parquet"))
    task = CodeData(TaskData(str(tmp_path), num_heldout=2), pool=FakePool(1))
    assert len(task.training) == 10


def test_a_warm_up_shows_right_programs(data, tmp_path):
    task = CodeData(TaskData(data, num_heldout=2), pool=FakePool(1))
    shown = task.demonstrate(task.training[0], Random(0))
    assert shown == f"```python\n{task.training[0]['answer']}\n```"
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(f"{json.dumps({**row, 'solutions': []})}\n" for row in ROWS))
    task = CodeData(TaskData(str(path), num_heldout=2), pool=FakePool(1))
    with pytest.raises(ConfigError, match=r"warmup\.steps=0"):
        task.demonstrate(task.training[0], Random(0))


@pytest.mark.parametrize(("reward", "partial"), [("code", False), ("code_partial", True)])
def test_a_recipe_names_it_by_its_reward(data, reward, partial):
    section = TaskSection("data", {"num_heldout": 2, "pool": FakePool(1)})
    task = build_task(section, data=data, reward=reward)
    assert isinstance(task, CodeData)
    assert task._settings.partial_credit is partial
    with pytest.raises(ConfigError, match="only reward"):
        build_task(section, data=data, reward=reward, reward_weights=[1])
