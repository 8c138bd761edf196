"""Which groups become which batch: laws over every order in which they can come."""

import re

import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError
from ludic.training.queue.arrivals import Arrivals, failed_group
from ludic.training.queue.base import Entry
from ludic.training.queue.entries import Group, as_played
from ludic.types import Rollout


def group(number):
    return Group("r", number, 0, played=as_played([Rollout(f"r{number}")]))


@st.composite
def logs(draw, size, steps):
    """The numbers of a log: each group once, some twice, some after entries that are refused
    (negative: -1 - n is one of group n)."""
    numbers = list(range(size * steps))
    again = draw(st.lists(st.sampled_from(numbers), max_size=5))
    refused = [-1 - number for number in draw(st.lists(st.sampled_from(numbers), max_size=5))]
    return draw(st.permutations([*numbers, *again, *refused]))


def take(arrivals, log, position):
    """Take the entry after `position` of a log whose positions are its indices."""
    number = log[position]
    if number < 0:
        arrivals.refuse(Entry(str(position), -1 - number, b""), "bad")
    else:
        arrivals.take(Entry(str(position), number, b""), group(number))


def train(arrivals, log, first, last, states=None):
    """The batches from `first` to before `last`, read from the arrivals' position on."""
    batches = []
    for batch in range(first, last):
        while (groups := arrivals.find_batch(batch)) is None:
            position = -1 if arrivals.position is None else int(arrivals.position)
            take(arrivals, log, position + 1)
        numbers = [each.number for each in groups]
        arrivals.mark_trained(numbers)
        batches.append(numbers)
        if states is not None:
            states.append(arrivals.state_dict())
    return batches


def make(order, size=2, slack=2):
    return Arrivals(groups_per_batch=size, order=order, slack=slack)


@given(st.data(), st.sampled_from(["exact", "arrival"]), st.integers(1, 3), st.integers(1, 3))
def test_each_group_is_trained_once_in_batches_of_the_same_size(data, order, size, slack):
    log = data.draw(logs(size, 5))
    batches = train(make(order, size, slack), log, 0, 5)
    assert sorted(number for batch in batches for number in batch) == list(range(5 * size))
    assert {len(batch) for batch in batches} == {size}


@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_no_group_is_trained_later_than_the_slack_allows(data, size, slack):
    batches = train(make("arrival", size, slack), data.draw(logs(size, 6)), 0, 6)
    assert all(batch <= number // size + slack for batch, numbers in enumerate(batches) for number in numbers)


@given(st.data(), st.sampled_from(["exact", "arrival"]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4))
def test_a_resumed_run_makes_the_batches_that_it_made_before(data, order, size, slack, resumed):
    log = data.draw(logs(size, 6))
    states = [make(order, size, slack).state_dict()]
    batches = train(make(order, size, slack), log, 0, 6, states)
    again = make(order, size, slack)
    again.load_state_dict(states[resumed])
    assert train(again, log, resumed, 6) == batches[resumed:]


def test_batches_by_number():
    assert train(make("exact"), [0, 3, 2, 5, 4, 1], 0, 3) == [[0, 1], [2, 3], [4, 5]]


def test_batches_by_arrival_wait_for_what_is_overdue():
    """Batch 2 needs all of batch 0: group 1, which comes last. It takes 1 and 4 and leaves 7."""
    assert train(make("arrival"), [0, 3, 2, 5, 4, 7, 1, 6], 0, 4) == [[0, 3], [2, 5], [1, 4], [6, 7]]


def test_the_resume_position_is_before_the_oldest_entry_that_is_not_trained():
    arrivals = make("exact")
    for position in range(3):
        take(arrivals, [1, 2, 0], position)
    assert arrivals.resume_position is None  # the first entry is still needed
    arrivals.mark_trained([0, 1])
    assert arrivals.resume_position == "0"  # group 2 is the entry after it
    arrivals.mark_trained([2])
    assert arrivals.resume_position == "2"


def test_a_group_that_came_twice_is_taken_once():
    arrivals = make("exact")
    assert [arrivals.take(Entry("1", 0, b""), group(0)), arrivals.take(Entry("2", 0, b""), group(0))] == [True, False]
    assert (len(arrivals), arrivals.duplicates) == (1, 1)


def test_a_group_that_is_refused_three_times_is_given_up_and_counts_as_failed():
    arrivals = make("exact", size=1)
    assert [arrivals.refuse(Entry(str(i), 0, b""), f"bad {i}") for i in range(3)] == [False, False, True]
    (failed,) = arrivals.find_batch(0)
    assert list(failed.played) == []
    assert re.search("refused 3 times; .*bad 2", failed.played.failures[0].error)
    assert arrivals.abandoned == 1


def test_entries_of_no_group_are_refused_without_a_trace():
    arrivals = make("exact")
    assert not arrivals.refuse(Entry("7", None, b""), "bad")
    assert not arrivals.refuse(Entry("8", -3, b""), "bad")
    assert arrivals.resume_position == "8"


def test_a_group_whose_actors_died_is_counted_as_given_up():
    arrivals = make("exact")
    arrivals.take(Entry("1", 0, b""), failed_group("r", 0, 0, "died", attempt=3))
    arrivals.take(Entry("2", 1, b""), failed_group("r", 1, 0, "an error", attempt=0))
    assert arrivals.abandoned == 1


@given(st.data(), st.sampled_from(["exact", "arrival"]), st.integers(0, 4), st.integers(0, 8))
def test_a_run_that_is_resumed_twice_makes_the_batches_that_it_made_before(data, order, resumed, taken):
    """The second time from a state of the first, when a part of what was taken before was read."""
    log = data.draw(logs(2, 6))
    states = [make(order).state_dict()]
    batches = train(make(order), log, 0, 6, states)
    first, second = make(order), make(order)
    first.load_state_dict(states[resumed])
    while taken and first.find_batch(resumed) is None:
        take(first, log, 0 if first.position is None else int(first.position) + 1)
        taken -= 1
    second.load_state_dict(first.state_dict())
    assert train(second, log, resumed, 6) == batches[resumed:]


def test_a_log_that_ends_before_what_was_taken_has_lost_data_and_is_read_as_it_is():
    arrivals = make("exact", size=1)
    arrivals.load_state_dict({"ledger": {"watermark": 0, "above": []}, "position": None, "taken_through": "9"})
    arrivals.take(Entry("1", 0, b""), group(0))
    assert arrivals.find_batch(0) is None
    arrivals.reach_end()
    assert [each.number for each in arrivals.find_batch(0)] == [0]


@pytest.mark.parametrize(
    "options",
    [{"groups_per_batch": 0}, {"order": "random"}, {"slack": 0}, {"max_attempts": 0}],
    ids=lambda options: next(iter(options)),
)
def test_settings_that_make_no_sense_are_named(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Arrivals(**{"groups_per_batch": 2, **options})
