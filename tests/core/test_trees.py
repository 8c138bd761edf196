"""Prefix trees: every prefix of a line is computed once, and every sample can be read back."""

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic import _core
from ludic.errors import BudgetError, ConfigError, DataError, DataTypeError

SAMPLES = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=9), min_size=1, max_size=20)


def table_of(samples, **options):
    ids = [token for sample in samples for token in sample]
    offsets = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])])
    return _core.SampleTable.from_columns(ids, [1] * len(ids), offsets, **options)


def prefixes(samples):
    return {tuple(sample[:end]) for sample in samples for end in range(1, len(sample) + 1)}


@given(SAMPLES, st.integers(0, 30))
def test_a_line_has_each_prefix_once_and_fits_the_budget(samples, spare):
    budget = max(map(len, samples)) + spare
    order, shared, bounds, tokens = table_of(samples).plan_trees(range(len(samples)), budget)
    assert sorted(order.tolist()) == list(range(len(samples)))
    assert (order.dtype, shared.dtype, bounds.dtype, tokens.dtype) == (np.int64, np.int64, np.int64, np.int32)
    for (begin, end), count in zip(itertools.pairwise(bounds), tokens, strict=True):
        assert count == len(prefixes([samples[index] for index in order[begin:end]])) <= budget
        assert shared[begin] == 0


@given(SAMPLES, st.integers(0, 30), st.booleans())
def test_every_sample_is_read_back_from_its_row(samples, spare, reused):
    table = table_of(samples)
    order, shared, _, tokens = table.plan_trees(np.arange(len(samples)), max(map(len, samples)) + spare)
    row = table.collate_trees(order, shared, _core.Arena() if reused else None)
    assert row["input_ids"].shape == row["position_ids"].shape == (1, tokens.sum())
    ends = np.cumsum([len(samples[index]) for index in order])
    for index, places in zip(order, np.split(row["places"], ends[:-1]), strict=True):
        assert row["input_ids"][0, places].tolist() == samples[index]
        assert row["position_ids"][0, places].tolist() == list(range(len(samples[index])))
        assert (np.diff(places) > 0).all()


def test_a_short_prefix_is_not_shared():
    """[1 2 9] and [1 2 8] share 2 tokens: with the least of 3 they are 6 tokens in two lines, with
    2 they are 4 in one."""
    table = table_of([[1, 2, 9], [1, 2, 8]])
    assert table.plan_trees([0, 1], 9, 3)[3].tolist() == [3, 3]
    assert table.plan_trees([0, 1], 9, 2)[3].tolist() == [4]


@given(SAMPLES, st.integers(0, 30))
def test_a_pair_is_in_one_line(samples, spare):
    samples = samples + samples[: len(samples) % 2]
    budget = 2 * max(map(len, samples)) + spare
    order, _, bounds, tokens = table_of(samples).plan_trees(range(len(samples)), budget, paired=True)
    assert sorted(order.tolist()) == list(range(len(samples)))
    for (begin, end), count in zip(itertools.pairwise(bounds), tokens, strict=True):
        line = set(order[begin:end].tolist())
        assert {index ^ 1 for index in line} == line
        assert count == len(prefixes([samples[index] for index in line])) <= budget


def test_half_a_pair_and_a_budget_for_one_sample_are_refused():
    table = table_of([[1, 2, 9], [1, 2, 8]])
    with pytest.raises(DataError, match="indices has length 1"):
        table.plan_trees([0], 9, paired=True)
    with pytest.raises(BudgetError, match=r"micro_token_budget \(5\) .*longest pair \(3\)"):
        table.plan_trees([0, 1], 5, paired=True)
    assert table.plan_trees([], 5, paired=True)[2].tolist() == [0]


def test_what_cannot_be_planned_is_refused():
    table = table_of([[1, 2, 9], [1, 2, 8]])
    with pytest.raises(BudgetError, match="micro_token_budget"):
        table.plan_trees([0, 1], 2)
    with pytest.raises(ConfigError, match=r"min_shared \(-1\) must not be negative"):
        table.plan_trees([0, 1], 9, -1)
    with pytest.raises(DataError, match="index 2 is outside"):
        table.plan_trees([0, 2], 9)
    with pytest.raises(ConfigError, match=r"shared \(3\) .*0 to 2"):
        table.collate_trees([0, 1], [0, 3])
    with pytest.raises(ConfigError, match=r"shared \(1\) .*0 to 0"):
        table.collate_trees([0, 1], [1, 0])
    with pytest.raises(DataError, match="shared has length 1"):
        table.collate_trees([0, 1], [0])
    with pytest.raises(DataTypeError):
        table.plan_trees(np.array([True, False]), 9)


def test_a_table_knows_whether_a_sample_has_an_attention_mask():
    assert not table_of([[1, 2]]).has_partial_attention
    assert not table_of([[1, 2]], attention_mask=[1, 1]).has_partial_attention
    assert table_of([[1, 2]], attention_mask=[1, 0]).has_partial_attention
