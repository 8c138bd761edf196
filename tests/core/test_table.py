"""What a table accepts and refuses. An error names the sample, the value and the rule."""

import re
import sys
from dataclasses import replace
from typing import Any

import collation_oracle as oracle
import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic import _core
from ludic.errors import DataError, DataTypeError
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWItem

SAMPLE = SAWItem(input_ids=[5, 6, 7], attention_mask=[1, 1, 1], action_mask=[0, 1, 1], weight=0.5)


class Logps:
    """Attachments that have not been validated by `ActorTokenLogps`."""

    def __init__(self, token_logps: Any) -> None:
        self.token_logps = token_logps
        self.actor_logps = self


def with_logps(token_logps: Any) -> SAWItem:
    return replace(SAMPLE, attachments=Logps(token_logps))  # type: ignore[arg-type]


def contents(table: _core.SampleTable) -> list[dict[str, list[Any]]]:
    rows = ({"weights": table.weights[[row]], **table.collate([row], 0)} for row in range(len(table)))
    return [{name: values.tolist() for name, values in row.items()} for row in rows]


@given(oracle.items())
def test_every_sequence_type_gives_the_same_table(items: list[SAWItem]) -> None:
    plain = [oracle.truncate_right(item, sys.maxsize) for item in items]
    table = _core.SampleTable.from_items(items)
    assert contents(table) == contents(_core.SampleTable.from_items(tuple(plain)))
    assert table.lengths.tolist() == table.original_lengths.tolist() == [len(item.input_ids) for item in plain]
    assert table.action_counts.tolist() == [sum(item.action_mask) for item in plain]
    assert table.target_counts.tolist() == [sum(item.action_mask[1:]) for item in plain]
    assert table.num_tokens == sum(len(item.input_ids) for item in plain)
    assert len(table) == len(items)
    assert table.has_actor_logps == any(item.actor_logps is not None for item in items)


@given(oracle.items(plain=True), st.sampled_from([np.float32, np.float64]), st.sampled_from([np.int32, np.int64, np.uint16]))
def test_columns_and_items_give_the_same_table(items: list[SAWItem], floats: type, ints: type) -> None:
    def column(values: list[list[Any]], dtype: type) -> np.ndarray[Any, Any]:
        return np.array([value for row in values for value in row], dtype)

    logps = bool(items) and items[0].actor_logps is not None
    table = _core.SampleTable.from_columns(
        column([item.input_ids for item in items], ints),
        column([item.action_mask for item in items], bool),
        np.cumsum([0, *(len(item.input_ids) for item in items)]),
        weights=np.array([item.weight for item in items], floats),
        actor_logps=column([oracle.aligned_logps(item) for item in items], floats) if logps else None,
        attention_mask=column([item.attention_mask for item in items], np.uint8),
    )
    assert contents(table) == contents(_core.SampleTable.from_items(items))


def test_the_columns_are_a_copy() -> None:
    ids = np.arange(3)
    table = _core.SampleTable.from_columns(ids, [0, 1, 1], [0, 3])
    ids[:] = -1
    assert table.collate([0], 0)["input_ids"].tolist() == [[0, 1, 2]]
    assert table.weights.tolist() == [1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": [5, -6, 7]}, r"sample 1: input_ids\[1\] is -6, .* 0\.\.=2147483647"),
        ({"input_ids": [5, 6, 2**31]}, r"input_ids\[2\] is 2147483648"),
        ({"input_ids": [5, 2**63, 7]}, r"input_ids\[1\] is 9223372036854775808"),
        ({"input_ids": np.array([5, 6, 2**64 - 1], np.uint64)}, r"input_ids\[2\] is 18446744073709551615"),
        ({"input_ids": np.array([5, -1, 7], np.int8)}, r"input_ids\[1\] is -1"),
        ({"input_ids": [5, 6]}, r"action_mask has length 3 .*input_ids has length 2"),
        ({"action_mask": [0, 1]}, r"sample 1: action_mask .*2 but input_ids .*3"),
        ({"attention_mask": [1] * 4}, r"sample 1: attention_mask has length 4"),
        ({"action_mask": [0, 1, 2]}, r"action_mask\[2\] is 2, .*0 and 1"),
        ({"action_mask": [0, -1, 1]}, r"action_mask\[1\] is -1"),
        ({"action_mask": b"\0\1\3"}, r"action_mask\[2\] is 3"),
        ({"attention_mask": np.array([1, 1, 7])}, r"attention_mask\[2\] is 7"),
        ({"weight": float("nan")}, r"sample 1: weight is NaN"),
        ({"weight": float("-inf")}, r"weight is -inf"),
        ({"weight": 1e39}, r"weight is 1e39, .* float32"),
        ({"input_ids": [], "action_mask": [], "attention_mask": []}, r"sample 1 has no tokens.*; drop it"),
    ],
)
def test_the_error_of_an_invalid_value_names_it(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        _core.SampleTable.from_items([SAMPLE, replace(SAMPLE, **change)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": [5, 6.5, 7]}, r"sample 1: input_ids\[1\] is 6\.5 \(float\), .*integer"),
        ({"input_ids": [5, None, 7]}, r"input_ids\[1\] is None"),
        ({"input_ids": "abc"}, r"input_ids is a str"),
        ({"input_ids": None}, r"input_ids is a NoneType"),
        ({"input_ids": iter([5, 6, 7])}, r"input_ids is a list_iterator"),
        ({"input_ids": np.zeros(3)}, r'input_ids is a buffer of format "d"'),
        ({"input_ids": np.zeros(3, complex)}, r'format "Zd"'),
        ({"input_ids": np.array([5, 6, 7], object)}, r"input_ids"),
        ({"input_ids": np.array([5, 6, 7], ">i4")}, r'format ">i".* native byte order'),
        ({"input_ids": np.zeros((3, 1), int)}, r"input_ids has 2 dimensions"),
        ({"input_ids": np.array(3)}, r"input_ids is a ndarray, .*one-dimensional"),
        ({"action_mask": [0.0, 1.0, 1.0]}, r"action_mask\[0\] is 0\.0 \(float\)"),
        ({"action_mask": np.array([0.0, 1.0, 1.0])}, r"action_mask is a buffer"),
        ({"weight": "0.5"}, r"sample 1: weight is '0\.5'"),
        ({"weight": None}, r"weight is None"),
    ],
)
def test_the_error_of_a_wrong_type_names_it(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataTypeError, match=message):
        _core.SampleTable.from_items([SAMPLE, replace(SAMPLE, **change)])


@pytest.mark.parametrize(
    ("logps", "error", "message"),
    [
        ([-0.1], DataError, r"sample 0 has 1 actor log-probs for 2"),
        ([-0.1, -0.2, -0.3], DataError, r"Length mismatch: sample 0 has 3"),
        ([-0.1, float("nan")], DataError, r"sample 0: actor log-prob 1 is NaN"),
        ([float("-inf"), -0.1], DataError, r"actor log-prob 0 is -inf"),
        ([-1e300, -0.1], DataError, r"actor log-prob 0 .* finite in float32"),
        (np.array([-0.1, np.inf], np.float32), DataError, r"actor log-prob 1 is inf"),
        (np.array([-1, -2]), DataTypeError, r"actor_logps is a buffer of format"),
        (["-0.1", -0.2], DataTypeError, r"actor_logps\[0\] is '-0\.1' \(str\), .*number"),
    ],
)
def test_the_error_of_invalid_log_probs_names_them(logps: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _core.SampleTable.from_items([with_logps(logps)])


def test_log_probs_are_on_all_samples_or_on_none() -> None:
    other = replace(SAMPLE, attachments=SampleAttachments(ActorTokenLogps([-0.1, -0.2])))
    with pytest.raises(DataError, match=r"Mixed presence .* sample 2 has some"):
        _core.SampleTable.from_items([SAMPLE, SAMPLE, other])
    with pytest.raises(DataError, match=r"Mixed presence .* sample 1 has none"):
        _core.SampleTable.from_items([other, SAMPLE])


@pytest.mark.parametrize("items", [[3], [None], [SAMPLE, {"input_ids": [1]}], 7, iter([SAMPLE])])
def test_objects_that_are_not_samples_are_refused(items: Any) -> None:
    with pytest.raises(DataTypeError, match="SAWItem"):
        _core.SampleTable.from_items(items)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"offsets": []}, "offsets is empty"),
        ({"offsets": [0, 3]}, r"end at 3, but must .* \(4\)"),
        ({"offsets": [1, 4]}, "begin at 1"),
        ({"offsets": [0, 3, 2, 4]}, "sample 1: offsets fall .*3 to 2"),
        ({"offsets": [0, -1, 4]}, "sample 0: offsets fall .*0 to -1"),
        ({"offsets": [0, 4, 4]}, "sample 1 has no tokens"),
        ({"action_mask": [1] * 3}, "action_mask has length 3, .*length 4"),
        ({"attention_mask": [1] * 5}, "attention_mask has length 5"),
        ({"actor_logps": [0.0]}, "actor_logps has length 1"),
        ({"weights": [1.0, 2.0, 3.0]}, "weights has length 3, .*length 2"),
        ({"weights": [1.0, np.inf]}, "sample 1: weight is inf"),
        ({"actor_logps": [0.0, -1.0, 0.0, np.nan]}, "sample 1: actor log-prob 1 is NaN"),
        ({"input_ids": [1, 2, -3, 4]}, r"sample 1: input_ids\[0\] is -3"),
    ],
)
def test_the_error_of_invalid_columns_names_them(columns: dict[str, Any], message: str) -> None:
    sound = {"input_ids": [1, 2, 3, 4], "action_mask": [0, 1, 0, 1], "offsets": [0, 2, 4]}
    with pytest.raises(DataError, match=message):
        _core.SampleTable.from_columns(**(sound | columns))


def test_too_many_items_are_refused_before_one_is_read() -> None:
    with pytest.raises(DataError, match="10000000 items are more"):
        _core.SampleTable.from_items([None] * 10_000_000)  # type: ignore[list-item]


def test_columns_of_ten_million_rows_become_a_table() -> None:
    rows = 10_000_000
    ones = np.ones(rows, np.uint8)
    assert len(_core.SampleTable.from_columns(ones, ones, np.arange(rows + 1))) == rows


def test_a_bad_token_after_ten_million_is_refused() -> None:
    ids = np.zeros(10_000_000, np.int64)
    ids[-1] = -1
    mask = np.zeros(len(ids), np.uint8)
    with pytest.raises(DataError, match=re.escape("input_ids[9999999] is -1")):
        _core.SampleTable.from_columns(ids, mask, [0, len(ids)])


class Shrinking:
    """Converts to 1 and empties the list that contains it while doing so."""

    def __init__(self, home: list[Any]) -> None:
        self.home = home

    def __index__(self) -> int:
        self.home.clear()
        return 1


def test_a_list_that_changes_while_it_is_read_is_refused() -> None:
    ids: list[Any] = [5, None, 7]
    ids[1] = Shrinking(ids)
    with pytest.raises(IndexError):
        _core.SampleTable.from_items([replace(SAMPLE, input_ids=ids)])


def test_reading_neither_leaks_nor_steals_references() -> None:
    value = 123_456_789
    ids = [value, value + 1 - 1, value]
    before = [sys.getrefcount(item) for item in (ids, *ids)]
    for _ in range(100):
        _core.SampleTable.from_items([replace(SAMPLE, input_ids=ids)])
    assert [sys.getrefcount(item) for item in (ids, *ids)] == before


@given(oracle.items(plain=True), st.sampled_from([list, np.float32, np.float64]))
def test_with_weights_gives_the_table_of_the_items_with_these_weights(items: list[SAWItem], kind: Any) -> None:
    weights = [index / 4 - 1 for index in range(len(items))]
    table = _core.SampleTable.from_items(items).with_weights(kind(weights) if kind is list else np.array(weights, kind))
    weighed = [replace(item, weight=weight) for item, weight in zip(items, weights, strict=True)]
    assert table.to_bytes() == _core.SampleTable.from_items(weighed).to_bytes()


def test_with_weights_refuses_another_number_and_other_types() -> None:
    table = _core.SampleTable.from_items([SAMPLE, SAMPLE])
    with pytest.raises(DataError, match="weights"):
        table.with_weights([1.0])
    with pytest.raises(DataError, match="sample 1"):
        table.with_weights(np.array([1.0, np.nan]))
    with pytest.raises(DataTypeError):
        table.with_weights(["a", "b"])  # type: ignore[list-item]
    assert table.weights.tolist() == [0.5, 0.5]
