"""The ledger against a set of numbers."""

import json

import pytest
from hypothesis import given, strategies as st

from ludic.errors import CheckpointError, DataError
from ludic.training.queue.arrivals import Ledger

NUMBERS = st.lists(st.integers(0, 12), max_size=15)


def ledger_of(numbers):
    ledger = Ledger()
    ledger.mark_trained(numbers)
    return ledger


@given(NUMBERS, st.integers(0, 15))
def test_it_holds_what_a_set_holds(numbers, end):
    ledger, model = Ledger(), set()
    for number in numbers:
        if number in model:
            with pytest.raises(DataError, match=f"group {number} cannot be trained"):
                ledger.mark_trained([number])
        else:
            ledger.mark_trained([number])
            model.add(number)
        assert [ledger.is_trained(each) for each in range(14)] == [each in model for each in range(14)]
    assert ledger.list_missing(end) == [number for number in range(end) if number not in model]
    assert len(ledger) == len(model)
    assert ledger.watermark == min(set(range(20)) - model)


@given(st.sets(st.integers(0, 12)), st.lists(st.integers(-2, 12), max_size=4))
def test_numbers_are_added_all_or_none(trained, added):
    ledger = ledger_of(trained)
    before = ledger.state_dict()
    if min(added, default=0) < 0 or len(set(added)) < len(added) or trained & set(added):
        with pytest.raises(DataError, match="each is trained once"):
            ledger.mark_trained(added)
        assert ledger.state_dict() == before
    else:
        ledger.mark_trained(added)
        assert len(ledger) == len(trained) + len(added)


@given(st.sets(st.integers(0, 30)))
def test_its_state_is_json_and_comes_back(numbers):
    again = Ledger()
    again.load_state_dict(json.loads(json.dumps(ledger_of(numbers).state_dict())))
    assert again.state_dict() == ledger_of(numbers).state_dict()


def test_a_worked_example():
    assert ledger_of([0, 1, 2, 5]).state_dict() == {"watermark": 3, "above": [5]}
    assert ledger_of([0, 1, 2, 5, 4, 3]).state_dict() == {"watermark": 6, "above": []}


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"watermark": "3", "above": []},
        {"watermark": -1, "above": []},
        {"watermark": 3, "above": [3]},
        {"watermark": 3, "above": [1]},
        {"watermark": 3, "above": [5, 5]},
        {"watermark": 3, "above": ["5"]},
        {"watermark": 3, "above": None},
    ],
)
def test_a_state_that_no_ledger_has_is_refused(state):
    ledger = ledger_of([0])
    with pytest.raises(CheckpointError, match="is no ledger"):
        ledger.load_state_dict(state)
    assert ledger.state_dict() == {"watermark": 1, "above": []}
