"""Rows that stay on disk are those that are read into memory."""

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ludic.data import load_data
from ludic.errors import ConfigError, DataError

values = st.one_of(st.text(min_size=1), st.integers(), st.none())
rows_of_text = st.lists(
    st.fixed_dictionaries(
        {"prompt": st.text(min_size=1)}, optional={"answer": values, "level": values, "completion": st.text(min_size=1)}
    ),
    min_size=1,
    max_size=12,
)


def write(path: Path, rows: list[dict], breaks: list[str] | None = None, head: bytes = b"") -> str:
    """The rows as JSON lines, each followed by a line break, or by its element of `breaks`."""
    ends = breaks or ["\n"] * len(rows)
    path.write_bytes(head + "".join(json.dumps(row) + end for row, end in zip(rows, ends, strict=True)).encode())
    return str(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), rows=rows_of_text, head=st.sampled_from([b"", b"\xef\xbb\xbf", b"\n \n"]))
def test_the_rows_their_places_and_their_digest_are_the_same(tmp_path, data, rows, head):
    breaks = data.draw(st.lists(st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\n"]), min_size=len(rows), max_size=len(rows)))
    source = write(tmp_path / "rows.jsonl", rows, breaks, head)
    columns = {"prompt": ("question", "prompt"), "shown": ["prompt"]}
    on_disk = load_data(source, kind="prompt", columns=columns, streaming=True)
    in_memory = load_data(source, kind="prompt", columns=columns)
    assert list(on_disk) == [on_disk[index] for index in range(len(on_disk))] == in_memory.rows
    assert on_disk[-1] == in_memory[-1]
    assert on_disk[1:] == in_memory[1:]
    assert [on_disk.where(index) for index in range(len(rows))] == [in_memory.where(index) for index in range(len(rows))]
    assert on_disk.digest() == in_memory.digest()
    with pytest.raises(IndexError):
        on_disk[len(rows)]


def test_parquet_files_and_folders_stay_on_disk_too(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} for n in range(5)]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    for source in (str(tmp_path / "rows.parquet"), str(tmp_path / "saved")):
        on_disk = load_data(source, kind="prompt", streaming=True)
        assert list(on_disk) == [on_disk[index] for index in range(5)] == load_data(source, kind="prompt").rows == rows
        assert on_disk.where(2) == f"{source}, row 3"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"prompt": ""}', "line 3: prompt is empty"),
        (b'{"question": "1?"}', "line 3: it has no 'prompt'"),
        (b"[1]", "line 3 must be an object"),
        (b'{"prompt": 1', "line 3 is not JSON"),
        (b'{"prompt": "\xff"}', "line 3 is not UTF-8"),
    ],
)
def test_a_wrong_row_is_found_before_anything_is_played(tmp_path, line, fault):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"rows\.jsonl, {fault}"):
        load_data(str(path), kind="prompt", streaming=True)


def test_a_file_that_changes_while_it_is_in_use_is_an_error(tmp_path):
    source = write(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    loaded = load_data(source, kind="prompt", streaming=True)
    write(tmp_path / "rows.jsonl", [{"prompt": "longer"}, {"prompt": "b"}])
    for read in (lambda: loaded[1], lambda: list(loaded)):
        with pytest.raises(DataError, match=r"rows\.jsonl was changed .*put the old content back"):
            read()


def test_a_file_that_is_taken_away_is_an_error(tmp_path):
    source = write(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    loaded = load_data(source, kind="prompt", streaming=True)
    Path(source).rename(tmp_path / "moved.jsonl")
    with pytest.raises(DataError, match=r"rows\.jsonl .*No such file or directory.*resume"):
        loaded[0]


def test_a_parquet_file_is_read_by_its_name_and_not_by_a_pattern(tmp_path):
    datasets = pytest.importorskip("datasets")
    for name in ("d[12].parquet", "d1.parquet"):
        datasets.Dataset.from_list([{"prompt": name}]).to_parquet(str(tmp_path / name))
    assert load_data(str(tmp_path / "d[12].parquet"), kind="prompt", streaming=True)[0] == {"prompt": "d[12].parquet"}


def test_what_cannot_stay_on_disk_is_refused(tmp_path):
    csv = tmp_path / "rows.csv"
    csv.write_text("prompt\na\n")
    with pytest.raises(DataError, match=r"rows\.csv cannot stay on disk; .*streaming=false"):
        load_data(str(csv), kind="prompt", streaming=True)
    with pytest.raises(DataError, match=r"none\.jsonl does not exist"):
        load_data(str(tmp_path / "none.jsonl"), kind="prompt", streaming=True)
    source = write(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    for wrong in ({"kind": None}, {"kind": "preference"}, {"kind": "prompt", "limit": 1}):
        with pytest.raises(ConfigError, match="streaming needs a kind other than preference"):
            load_data(source, streaming=True, **wrong)


def test_memory_holds_16_bytes_a_row(tmp_path):
    source = write(tmp_path / "rows.jsonl", [{"prompt": f"{n} " + "x" * 2000} for n in range(5000)])  # 10 MB
    tracemalloc.start()
    try:
        loaded = load_data(source, kind="prompt", streaming=True)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(loaded) == 5000
    assert held < 16 * 5000 * 1.2 + 50_000  # an array grows by an eighth
    assert peak < 1_000_000
