"""Blank lines and byte order marks are the same to all readers of JSONL files: in memory, with the
rows left on disk, and as a stream."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ludic.data.row_stream import JSONLReader, RowStream
from ludic.data.rows_on_disk import LineRows
from ludic.data.sources import read_table
from ludic.errors import DataError
from ludic.files.jsonl import read_jsonl

BOM = "\ufeff".encode()
BLANK = [b"", b" ", b"\t", b"\r", b" \t\r", b"\x0b\x0c", BOM, BOM + b" \r"]
NOT_BLANK = ["\xa0", "\u2003", "\x85", "\x1c", "x", "[1]", "\ufeff\ufeff"]
"""Nothing but these is no object, and no blank line either: JSON has no such spaces."""


def rows_of(read):
    """The rows, or the number of the line that is wrong: `file, line 3` or `file:3`."""
    try:
        return list(read())
    except DataError as error:
        return int(re.search(r"rows\.jsonl(?:, line |:)(\d+)", str(error))[1])


def readers(path):
    name = str(path)

    def stream():
        found = RowStream([name], shuffle=False).first(10_000)
        return [row for _, row in found]

    return {
        "memory": lambda: read_table(name).rows,
        "disk": lambda: list(LineRows(name, path)),
        "disk, one by one": lambda: LineRows(name, path)[:],
        "stream": stream,
        "lines": lambda: [row for _, row in read_jsonl(path)],
    }


@st.composite
def files(draw):
    """(content, the rows or the number of the first line that is none)."""
    lines, rows, wrong = [], [], None
    for number in range(1, draw(st.integers(0, 6)) + 1):
        kind = draw(st.sampled_from(["row", "row", "row", "blank", "blank", "wrong"]))
        if kind == "row":
            row = {"a": draw(st.integers(0, 9)), "b": draw(st.sampled_from(["", "\u2028", "\x85", "\ufeff"]))}
            rows.append(row)
            ends = draw(st.sampled_from([b"", b"\r", b" "]))
            lines.append(draw(st.sampled_from([b"", BOM])) + json.dumps(row, ensure_ascii=False).encode() + ends)
        elif kind == "blank":
            lines.append(draw(st.sampled_from(BLANK)))
        else:
            lines.append(draw(st.sampled_from(NOT_BLANK)).encode())
            wrong = wrong or number
    return b"\n".join(lines) + draw(st.sampled_from([b"", b"\n"])) * bool(lines), rows if wrong is None else wrong


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=files())
def test_all_readers_find_the_same_rows(tmp_path, made):
    content, expected = made
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    for name, read in readers(path).items():
        assert rows_of(read) == expected, name
    if isinstance(expected, list):
        assert JSONLReader("rows", path).count() == len(LineRows("rows", path)) == len(expected)


@pytest.mark.parametrize("place", [0, 1])
def test_a_byte_order_mark_inside_a_file_that_was_joined_of_two(tmp_path, place):
    """Regression test: the reader in memory refused the second mark, the others took it."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes((BOM if place == 0 else b"") + b'{"a": 1}\n' + BOM + b'{"a": 2}\n')
    for name, read in readers(path).items():
        assert rows_of(read) == [{"a": 1}, {"a": 2}], name
