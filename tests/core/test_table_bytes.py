"""A table as bytes: it is read as it was written, and others read its columns as safetensors."""

import struct
from typing import Any

import collation_oracle as oracle
import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import load

from ludic import _core
from ludic.errors import DataError, DataTypeError
from ludic.training.types import SAWItem

COLUMNS: dict[str, Any] = {"input_ids": [5, 6, 7, 8, 9], "action_mask": [0, 1, 1, 0, 1], "offsets": [0, 3, 5]}


def contents(table: _core.SampleTable) -> dict[str, Any]:
    columns = {"lengths": table.lengths, "whole": table.original_lengths, "weights": table.weights, "chains": table.chains}
    layout = table.collate(np.arange(len(table)), 0) if len(table) else {}
    return {name: values.tolist() for name, values in {**columns, **layout}.items()}


@given(oracle.items(), st.integers(1, 40), st.booleans())
def test_a_table_is_read_as_it_was_written(items: list[SAWItem], limit: int, chained: bool) -> None:
    table = _core.SampleTable.from_items(items).truncate(limit)
    table = table.chained() if chained else table
    read = _core.SampleTable.from_bytes(table.to_bytes())
    assert contents(read) == contents(table)
    assert read.to_bytes() == table.to_bytes()


@given(oracle.items())
def test_a_reader_of_safetensors_finds_the_arguments_of_from_columns(items: list[SAWItem]) -> None:
    table = _core.SampleTable.from_items(items)
    columns: Any = load(table.to_bytes())
    assert contents(_core.SampleTable.from_columns(**columns)) == contents(table)


@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_any_buffer_of_bytes_is_read(buffer: Any) -> None:
    table = _core.SampleTable.from_columns(**COLUMNS)
    assert contents(_core.SampleTable.from_bytes(buffer(table.to_bytes()))) == contents(table)


def test_the_table_shares_no_memory_with_the_buffer() -> None:
    buffer = bytearray(_core.SampleTable.from_columns(**COLUMNS).to_bytes())
    table = _core.SampleTable.from_bytes(buffer)
    buffer[:] = bytes(len(buffer))
    assert table.collate([0], 0)["input_ids"].tolist() == [[5, 6, 7]]


@pytest.mark.parametrize("value", ["text", 3, None, [1, 2], np.zeros(40, np.float32)])
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(DataTypeError, match="a table cannot be read from a"):
        _core.SampleTable.from_bytes(value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"version":"1"', b'"version":"9"', r'version "9" cannot .*version "1"; .*ludic'),
        (b"[5]", b"[6]", r"column input_ids .* 24\.\.44, .*6 values of 4 bytes"),
        (b'"weights"', b'"credits"', "missing field `weights`"),
        (struct.pack("<i", 9), struct.pack("<i", -9), r"sample 1: input_ids\[1\] is -9"),
    ],
)
def test_damage_is_named(old: bytes, new: bytes, message: str) -> None:
    data = _core.SampleTable.from_columns(**COLUMNS).to_bytes()
    with pytest.raises(DataError, match=message):
        _core.SampleTable.from_bytes(data.replace(old, new))
