"""`streaming=true` of `ludic train`: the same problems and the same batches, with the rows on
disk."""

import json
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ludic.errors import ConfigError, DataError
from ludic.recipes.build import build_task
from ludic.recipes.compose import compose
from ludic.recipes.schema import TaskSection
from ludic.runs.rollouts import make_training_requests
from ludic.tasks.data_task import DataTask, TaskData


def one(completions, **columns):
    return [1.0] * len(completions)


ONE = f"{__name__}:one"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_both(source, reward=ONE, **settings_of_data):
    made = [DataTask(TaskData(source, streaming=streaming, **settings_of_data), reward) for streaming in (True, False)]
    return made[0], made[1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(
    questions=st.lists(st.integers(0, 9), min_size=3, max_size=25).filter(lambda numbers: len(set(numbers)) > 2),
    held=st.sampled_from([None, 1, 2]),
    separate=st.booleans(),
    prompts=st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_the_batches_are_those_of_data_in_memory(tmp_path, questions, held, separate, prompts, seed):
    rows = [{"prompt": f"{n}?", "answer": str(n), **({"note": n} if n % 2 else {})} for n in questions]
    source = write(tmp_path / "p.jsonl", rows)
    other = write(tmp_path / "h.jsonl", [{"prompt": "h?", "answer": "h"}, rows[0]]) if separate else None
    streamed, plain = make_both(source, num_heldout=held, heldout_data=other)
    assert list(streamed.heldout()) == list(plain.heldout())
    assert list(streamed.training) == list(plain.training)
    assert streamed.digest == plain.digest
    section = compose(["data", f"rollout.prompts={prompts}", "model=m", f"data={source}", "reward=gsm8k"]).rollout
    requests = [make_training_requests(task, section, seed=seed) for task in (streamed, plain)]
    for _ in range(4):
        batches = [[(one.env.kwargs, one.env_seed, one.meta["problem_id"]) for one in source()] for source in requests]
        assert batches[0] == batches[1]
    assert requests[0].state_dict() == requests[1].state_dict()


def test_only_the_held_out_problems_are_in_memory(tmp_path):
    source = write(tmp_path / "p.jsonl", [{"prompt": f"{n} " + "x" * 2000} for n in range(4000)])  # 8 MB
    tracemalloc.start()
    try:
        task = DataTask(TaskData(source, streaming=True, num_heldout=5), ONE)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(task.training) == 3995
    assert held < 1_000_000
    assert peak < 2_000_000


def test_a_row_that_no_reward_function_can_judge_is_found_at_the_start(tmp_path):
    source = write(tmp_path / "p.jsonl", [{"prompt": "a", "answer": "#### 1"}, {"prompt": "b"}])
    with pytest.raises(DataError, match=r"p\.jsonl, line 2: "):
        DataTask(TaskData(source, streaming=True), "gsm8k")


def test_tasks_that_read_no_rows_refuse_it(tmp_path):
    source = write(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(ConfigError, match=r"streaming need task\.kind=data; .*sort\) makes its own"):
        build_task(TaskSection(kind="sort"), streaming=True)
    with pytest.raises(ConfigError, match="streaming=true is for prompts with reward functions"):
        build_task(TaskSection(kind="data"), data=source, reward="code", streaming=True)
    with pytest.raises(ConfigError, match=r"streaming=true .*not a mixture"):
        build_task(TaskSection(kind="data"), data={"datasets": [{"id": source}]}, reward=ONE, streaming=True)
