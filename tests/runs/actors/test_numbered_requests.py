"""What an entry plays follows from its number."""

import random

import pytest
from hypothesis import given, strategies as st

from ludic.recipes.build import build_episodic_task
from ludic.recipes.compose import compose
from ludic.runs.actors.worker import NumberedRequests
from ludic.runs.rollouts import make_training_requests

RECIPE = compose(["sort", "rollout.prompts=4", "rollout.group_size=3", "queue.prompts_per_entry=2", "place.actors=1"])
TASK = build_episodic_task(RECIPE)


def facts(requests):
    return [(request.env.kwargs["problem"], request.env_seed, request.sampling_seed) for request in requests]


def test_the_entries_of_a_batch_are_the_batch_of_a_run_without_actors():
    batches = make_training_requests(TASK, RECIPE.rollout, seed=RECIPE.seed)
    entry = NumberedRequests(TASK, RECIPE)
    assert entry.entries_per_batch == 2
    assert entry.episodes_per_entry == 6
    for batch in range(4):
        assert facts([*entry(2 * batch), *entry(2 * batch + 1)]) == facts(batches())


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_an_entry_does_not_depend_on_what_was_played_before(numbers):
    played = NumberedRequests(TASK, RECIPE)
    random.seed(len(numbers))
    for number in numbers:
        fresh = NumberedRequests(TASK, RECIPE)(number)
        assert played(number) == fresh


def test_each_group_has_an_id_of_its_own():
    entry = NumberedRequests(TASK, RECIPE)
    ids = [request.meta["group_id"] for number in range(6) for request in entry(number)]
    assert [ids.count(group) for group in dict.fromkeys(ids)] == [3] * 12


def test_another_seed_has_other_prompts_and_ids():
    other = compose(
        ["sort", "rollout.prompts=4", "rollout.group_size=3", "queue.prompts_per_entry=2", "place.actors=1", "seed=1"]
    )
    one, two = NumberedRequests(TASK, RECIPE)(3), NumberedRequests(TASK, other)(3)
    assert facts(one) != facts(two)
    assert {request.meta["group_id"] for request in one}.isdisjoint(request.meta["group_id"] for request in two)


@pytest.mark.parametrize("number", [0, 7])
def test_a_list_of_problems_is_passed_through_in_the_order_of_a_run_without_actors(tmp_path, number):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}>", "completion": "{n}"}}\n' for n in range(30)))
    recipe = compose(
        [f"data={rows}", "reward=byte_rewards:mean_id", "rollout.prompts=4", "rollout.group_size=2", "place.actors=1"]
    )
    task = build_episodic_task(recipe)
    batches = make_training_requests(task, recipe.rollout, seed=recipe.seed)
    batches.batches = number
    entries = NumberedRequests(task, recipe)
    per_batch = entries.entries_per_batch
    played = [request for i in range(per_batch) for request in entries(number * per_batch + i)]
    assert facts(played) == facts(batches())
