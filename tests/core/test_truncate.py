"""Truncation and selection compared with list slicing."""

import collation_oracle as oracle
import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic import _core
from ludic.errors import ConfigError, DataError
from ludic.training.types import SAWItem


def table_of(*lengths: int) -> _core.SampleTable:
    offsets = np.cumsum([0, *lengths])
    ids = np.arange(offsets[-1])
    return _core.SampleTable.from_columns(ids, np.ones_like(ids), offsets)


@given(oracle.items(), st.integers(1, 45))
def test_truncation_equals_slicing_each_sample(items: list[SAWItem], max_seq_len: int) -> None:
    whole = _core.SampleTable.from_items(items)
    table = whole.truncate(max_seq_len)
    cut = [oracle.truncate_right(item, max_seq_len) for item in items]
    assert table.lengths.tolist() == [len(item.input_ids) for item in cut]
    assert table.action_counts.tolist() == [sum(item.action_mask) for item in cut]
    assert table.target_counts.tolist() == [sum(item.action_mask[1:]) for item in cut]
    assert table.original_lengths.tolist() == whole.lengths.tolist() == [len(item.input_ids) for item in items]


@given(oracle.items(min_size=1), st.data())
def test_selection_equals_indexing_the_list(items: list[SAWItem], data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, len(items) - 1), max_size=10))
    table = _core.SampleTable.from_items(items).select(indices)
    chosen = [oracle.truncate_right(items[index], 99) for index in indices]
    assert table.lengths.tolist() == [len(item.input_ids) for item in chosen]
    assert table.weights.tolist() == [item.weight for item in chosen]
    for row, item in enumerate(chosen):
        assert table.collate([row], 0)["input_ids"].tolist() == [item.input_ids]


@pytest.mark.parametrize("max_seq_len", [0, -1, -(2**70)])
def test_a_length_that_is_not_positive_is_refused(max_seq_len: int) -> None:
    with pytest.raises(ConfigError, match=r"max_seq_len .* must be positive"):
        table_of(3).truncate(max_seq_len)


def test_a_length_beyond_every_sample_truncates_nothing() -> None:
    assert table_of(3, 5).truncate(2**70).lengths.tolist() == [3, 5]


def test_a_view_of_a_view_keeps_the_original_data() -> None:
    table = table_of(3, 5, 9).truncate(6).select([2, 0]).truncate(2)
    assert table.lengths.tolist() == [2, 2]
    assert table.original_lengths.tolist() == [9, 3]
    assert table.collate([0], 0)["input_ids"].tolist() == [[8, 9]]


def test_an_index_outside_the_table_is_refused() -> None:
    with pytest.raises(DataError, match=r"index 3 .*table of 3 samples"):
        table_of(1, 2, 3).select([0, 3])
