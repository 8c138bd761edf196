"""JSON lines files. An appended record starts on its own line, whatever a killed process left."""

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from ludic.errors import DataError
from ludic.files.jsonl import append_jsonl, parse_object, read_jsonl, repair_last_line, write_jsonl

objects = st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=200_000), max_size=2), max_size=4)


@given(objects, st.integers(0, 60))
def test_complete_lines_survive_a_torn_end_and_the_next_record_is_readable(tmp_path_factory, records, torn):
    path = tmp_path_factory.mktemp("log") / "records.jsonl"
    lines = [json.dumps(record).encode() + b"\n" for record in records]
    last = json.dumps({"the": "line that was being written"}).encode() + b"\n"
    path.write_bytes(b"".join(lines) + last[: min(torn, len(last) - 2)])  # the closing brace is always missing
    repair_last_line(path)
    assert path.read_bytes() == b"".join(lines)
    with path.open("ab") as file:
        file.write(last)
    assert [row for _, row in read_jsonl(path)] == [*records, json.loads(last)]


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": 2}')
    repair_last_line(path)
    assert path.read_bytes() == b'{"a": 1}\n{"b": 2}\n'


def test_a_removed_torn_line_is_reported(tmp_path, caplog):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b":')
    repair_last_line(path)
    assert re.search(rf"{re.escape(str(path))} ends with 5 bytes .*cut off", caplog.text)


def test_missing_files_and_special_files_are_left_alone(tmp_path):
    repair_last_line(tmp_path / "nothing.jsonl")
    assert not (tmp_path / "nothing.jsonl").exists()
    os.mkfifo(tmp_path / "pipe")
    repair_last_line(tmp_path / "pipe")  # opening a FIFO would wait for a reader


def test_reading_a_torn_line_is_an_error(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b":')
    with pytest.raises(DataError, match=r"records\.jsonl:2 is not JSON"):
        list(read_jsonl(path))


def test_records_are_written_and_appended_one_per_line(tmp_path):
    path = tmp_path / "made" / "records.jsonl"
    write_jsonl(path, [{"a": 1}, {"a": float("inf")}])
    append_jsonl(path, [{"a": "ä\n"}])
    assert path.read_text(encoding="utf-8") == '{"a":1}\n{"a":null}\n{"a":"ä\\n"}\n'
    write_jsonl(path, [{"b": 2}])
    assert [row for _, row in read_jsonl(path)] == [{"b": 2}]


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    path = tmp_path / "records.jsonl"
    write_jsonl(path, [{"n": 1}])

    def records():
        yield {"n": 2}
        raise KeyError("no more")

    with pytest.raises(KeyError):
        write_jsonl(path, records())
    assert path.read_text() == '{"n":1}\n'
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    write_jsonl(link, [{"n": 3}])
    assert link.is_symlink()
    assert path.read_text() == '{"n":3}\n'
    write_jsonl(os.devnull, [{"n": 4}])
    assert not Path(os.devnull).is_file()


def test_a_record_appended_after_half_a_line_is_readable(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b')
    append_jsonl(path, [{"c": 3}])
    assert [row for _, row in read_jsonl(path)] == [{"a": 1}, {"c": 3}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": }', "line 7 is not JSON: Expecting value at column 7"),
        ('{\n"a": }', "line 7 is not JSON: Expecting value at line 2"),
        (b"\xff", "line 7 is not JSON"),
        ("[" * 100_000, "line 7 is nested too deeply"),
        ("[1]", "line 7 holds a list"),
    ],
)
def test_a_line_that_is_not_an_object_is_refused_with_its_position(text, message):
    with pytest.raises(DataError, match=re.escape(message)):
        parse_object(text, "line 7")
