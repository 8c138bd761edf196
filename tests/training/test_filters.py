"""Filters of samples."""

import pytest

from ludic.training import any_of, apply_filter, combine, drop_incomplete_completions, drop_parse_errors, drop_truncated, keep_all
from ludic.training.types import SAWItem


def item(**meta):
    return SAWItem([1], [1], [1], 1.0, meta)


CASES = [
    (drop_truncated, {"truncated": True}, {"truncated": False}),
    (drop_incomplete_completions, {"finish_reason": "length"}, {"finish_reason": "stop"}),
    (drop_parse_errors, {"parse_error": True}, {"parse_error": False}),
]


@pytest.mark.parametrize(("keep", "dropped", "kept"), CASES)
def test_a_filter_drops_matching_samples_and_keeps_samples_without_the_key(keep, dropped, kept):
    assert keep(item(**dropped)) is False
    assert keep(item(**kept)) is True
    assert keep(item()) is True


@pytest.mark.parametrize("keep", [keep_all, *(case[0] for case in CASES)])
def test_a_filter_called_without_a_sample_returns_itself(keep):
    assert keep()(item(truncated=True, finish_reason="length", parse_error=True)) is (keep is keep_all)


def test_filters_can_be_combined():
    good, cut, wrong = item(), item(truncated=True), item(parse_error=True)
    both, either = combine(drop_truncated(), drop_parse_errors), any_of(drop_truncated, drop_parse_errors())
    assert apply_filter([good, cut, wrong], both) == [good]
    assert apply_filter([good, cut, wrong, item(truncated=True, parse_error=True)], either) == [good, cut, wrong]
    assert both(cut) is False
    assert combine()(cut) is True
    assert any_of()(good) is False


def test_a_filter_returns_a_bool_for_any_meta():
    for odd in (1, "yes", [0]):
        assert drop_truncated(item(truncated=odd)) is False
        assert drop_parse_errors(item(parse_error=odd)) is False
    assert drop_truncated(item(truncated=None)) is True
    assert combine(lambda sample: sample.meta)(item(a=1)) is True
    assert any_of(lambda sample: sample.meta)(item()) is False


def test_the_repr_of_a_filter_is_its_name():
    assert (drop_truncated.__name__, repr(drop_truncated)) == ("drop_truncated", "<filter drop_truncated>")
    assert "cut short" in drop_truncated.__doc__
