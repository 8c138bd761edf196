"""Passes over data: every sample once a pass, and the orders that saved positions depend on."""

import asyncio
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from ludic.data.passes import Passes, Shares, shuffle_range
from ludic.errors import ConfigError
from ludic.recipes.compose import compose
from ludic.runs.rollouts import PassRequests
from ludic.training import SAWItem
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.rollouts.requests import make_dataset_sequence_requests_fn


@given(st.integers(1, 20), st.integers(0, 3))
def test_every_pass_has_every_sample_once_in_the_order_of_its_number(length, number):
    passes = Passes(length, lambda number: shuffle_range(length, str(number)))
    order = [passes.at(number * length + offset) for offset in range(length)]
    assert order == list(shuffle_range(length, str(number)))
    assert sorted(order) == list(range(length))


def test_without_an_order_every_pass_is_that_of_the_data():
    passes = Passes(3)
    assert [passes.at(position) for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_the_sample_at_a_position_does_not_depend_on_what_was_read_before():
    orders = [[0, 1, 2], [2, 0, 1]]
    passes = Passes(3, lambda number: orders[number])
    assert [passes.at(position) for position in (4, 0, 5, 3, 2)] == [0, 0, 1, 2, 2]


def order_of(number, length):
    return shuffle_range(length, str(number))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_grown_passes_are_those_of_the_lengths_that_they_began_with(additions, data):
    """The oracle writes every pass out: those that have begun keep their length."""
    length, lengths = additions[0], [additions[0]]
    passes = Passes(length, lambda number: order_of(number, passes.length_of(number)))
    taken = []
    for added in [*additions[1:], 0]:
        taken += passes.take(data.draw(st.integers(0, 15)))
        number, offset = passes.locate(passes.position)
        lengths += [length] * (number + 1 - len(lengths))
        length += added
        lengths[number + (offset > 0) :] = [length]  # every pass that has not begun
        passes.grow(length)
    taken += passes.take(12)
    lengths += [length] * 13
    written = [row for number, length in enumerate(lengths) for row in order_of(number, length)]
    assert taken == written[: len(taken)]
    assert [passes.at(position) for position in range(len(taken))] == taken
    again = Passes(length, lambda number: order_of(number, again.length_of(number)))
    again.load_state_dict(passes.state_dict())
    assert again.take(9) == passes.take(9)
    assert [again.at(position) for position in range(len(taken))] == taken


def test_passes_only_grow_and_load_only_into_the_same_number():
    passes = Passes(3)
    with pytest.raises(ConfigError, match="3 samples cannot become 2"):
        passes.grow(2)
    with pytest.raises(ConfigError, match="3 samples were saved, not 4"):
        Passes(4).load_state_dict(passes.state_dict())
    with pytest.raises(ConfigError, match="at least one"):
        Passes(0)
    with pytest.raises(IndexError, match="before the first"):
        passes.at(-1)


# Saved positions of stopped runs count on these orders: a change of one of them is a change of what
# a resumed run trains on.


def test_the_order_of_item_batches_is_that_of_saved_positions():
    items = [SAWItem([i, i], [1, 1], [0, 1], 1.0, {"rollout_id": i}) for i in range(7)]
    source = ItemBatchSource(items, batch_size=3, seed=5)
    batches = [[item.meta["rollout_id"] for item in asyncio.run(source.next_batch()).items] for _ in range(7)]
    assert batches == [[1, 4, 2], [3, 6, 5], [0], [4, 2, 0], [6, 5, 3], [1], [0, 4, 5]]
    pairs = ItemBatchSource(items, batch_size=2, seed=5, unit=[2, 1, 1, 3])
    batches = [[item.meta["rollout_id"] for item in asyncio.run(pairs.next_batch()).items] for _ in range(4)]
    assert batches == [[4, 5, 6, 2], [3, 0, 1], [3, 0, 1], [4, 5, 6, 2]]


def test_the_order_of_shuffled_requests_is_that_of_saved_positions():
    requests = make_dataset_sequence_requests_fn(
        list("abcdefg"), batch_size=5, env_kind="e", protocol_kind="p", shuffle=True, rng_seed=5
    )
    indices = [[request.env_seed for request in requests()] for _ in range(4)]
    assert indices == [[2, 0, 4, 1, 3], [6, 5, 1, 5, 2], [3, 4, 6, 0, 3], [2, 0, 5, 6, 1]]


class Problems:
    training = tuple({"id": str(number)} for number in range(7))
    digest = "unchanged"

    def begin_batch(self, number):
        pass


class Task:
    max_new_tokens = 4


def test_the_order_of_a_recipes_problems_is_that_of_saved_positions():
    section = compose(["rollout.prompts=5", "rollout.group_size=1"]).rollout
    requests = PassRequests(Task(), Problems(), section, seed=5)
    batches = [requests() for _ in range(4)]
    assert ["".join(request.meta["problem_id"] for request in batch) for batch in batches] == ["56341", "20106", "45231", "25643"]
    assert batches[0][0].sampling_seed == 1494753605


WEIGHTS = st.builds(Fraction, st.integers(0, 9), st.integers(1, 9))
SCHEDULES = st.lists(st.dictionaries(st.integers(0, 40), WEIGHTS, max_size=4), min_size=1, max_size=5)


@given(SCHEDULES)
def test_after_any_position_each_source_has_its_share_to_less_than_one(weights):
    """Tijdeman's bound, with the shares summed up one position at a time."""
    weights = [{0: Fraction(1), **weights[0]}, *weights[1:]]
    current, due, counts = ([Fraction()] * len(weights) for _ in range(3))
    at_starts = [
        sum(each[max(before)] for each in weights if (before := [start for start in each if start <= position]))
        for position in range(41)
    ]
    if not all(at_starts):
        with pytest.raises(ConfigError, match=r"all weights are 0 from \d+ on; give"):
            Shares(weights)
        return
    shares = Shares(weights)
    for position in range(100):
        current = [each.get(position, weight) for each, weight in zip(weights, current, strict=True)]
        due = [all_so_far + weight / sum(current) for all_so_far, weight in zip(due, current, strict=True)]
        source, place = shares.at(position)
        assert place == counts[source]
        counts[source] += 1
        bound = 1 - Fraction(1, max(2, 2 * len(weights) - 2))
        assert max(abs(count - share) for count, share in zip(counts, due, strict=True)) <= bound


@given(SCHEDULES, st.lists(st.integers(0, 80), min_size=1, max_size=5))
def test_a_position_belongs_to_the_same_source_in_any_order_of_questions(weights, positions):
    weights = [{0: Fraction(1)}, *weights]
    in_order, asked = Shares(weights), Shares(weights)
    whole = [in_order.at(position) for position in range(81)]
    assert [asked.at(position) for position in positions] == [whole[position] for position in positions]


def test_shares_of_two_to_one_until_position_six_and_then_of_the_second_alone():
    shares = Shares([{0: Fraction(2), 6: Fraction(0)}, {0: Fraction(1)}])
    assert [shares.at(position)[0] for position in range(9)] == [0, 1, 0, 0, 1, 0, 1, 1, 1]
