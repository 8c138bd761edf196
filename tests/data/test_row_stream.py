"""Rows that are read in blocks: which rows a pass has, their order, ranks, positions and memory."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ludic.data.row_stream import RowStream
from ludic.errors import ConfigError, DataError

FAST = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
lengths = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any)


def write_shards(folder: Path, counts: list[int]) -> list[str]:
    """Files of so many rows; row k of file f is {"n": 100 * f + k}, with blank lines between."""
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for file, count in enumerate(counts):
        lines = "".join(json.dumps({"n": 100 * file + row}) + "\n" * (1 + row % 2) for row in range(count))
        (folder / f"{file}.jsonl").write_text(lines)
    return [str(path) for path in sorted(folder.iterdir())]


def numbers(stream: RowStream, count: int) -> list[int]:
    return [row["n"] for _, row in islice(stream, count)]


def oracle(counts: list[int], buffer: int, seed: int, passes: int) -> list[int]:
    """All rows of some passes, with everything in memory."""
    result: list[int] = []
    for number in range(passes):
        order = np.random.default_rng([seed, number]).permutation(len(counts)) if len(counts) > 1 else [0]
        rows = [100 * int(file) + row for file in order for row in range(counts[int(file)])]
        for block in range(-(-len(rows) // buffer)):
            part = rows[block * buffer : (block + 1) * buffer]
            result += [part[i] for i in np.random.default_rng([seed, number, block]).permutation(len(part))]
    return result


@FAST
@given(counts=lengths, buffer=st.integers(1, 12), seed=st.integers(0, 3))
def test_passes_are_those_of_a_shuffle_in_memory(tmp_path: Path, counts: list[int], buffer: int, seed: int) -> None:
    stream = RowStream(write_shards(tmp_path / "rows", counts), buffer_rows=buffer, seed=seed)
    assert stream.count_rows() == sum(counts)
    taken = numbers(stream, 3 * sum(counts))
    assert taken == oracle(counts, buffer, seed, 3)
    whole = sorted(100 * file + row for file, count in enumerate(counts) for row in range(count))
    assert [sorted(taken[k * len(whole) : (k + 1) * len(whole)]) for k in range(3)] == [whole] * 3


@FAST
@given(counts=lengths, buffer=st.integers(1, 12), before=st.integers(0, 30), world=st.integers(1, 3))
def test_a_resumed_stream_goes_on_with_the_next_row(
    tmp_path: Path, counts: list[int], buffer: int, before: int, world: int
) -> None:
    files = write_shards(tmp_path / "rows", counts)
    for rank in range(world):
        first, second = RowStream(files, buffer_rows=buffer), RowStream(files, buffer_rows=buffer)
        for stream in (first, second):
            stream.shard(rank, world)
        numbers(first, before)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert (numbers(second, 25), second.pass_number) == (numbers(first, 25), first.pass_number)


@FAST
@given(counts=lengths, buffer=st.integers(1, 12), world=st.integers(2, 4))
def test_ranks_share_each_row_once(tmp_path: Path, counts: list[int], buffer: int, world: int) -> None:
    files = write_shards(tmp_path / "rows", counts)
    whole = numbers(RowStream(files, buffer_rows=buffer), 6 * world)
    for rank in range(world):
        stream = RowStream(files, buffer_rows=buffer)
        stream.shard(rank, world)
        assert numbers(stream, 6) == whole[rank::world]


def test_without_shuffle_the_rows_are_in_the_order_of_the_files(tmp_path: Path) -> None:
    write_shards(tmp_path / "rows", [2, 3])
    stream = RowStream([str(tmp_path / "rows")], buffer_rows=4, shuffle=False)
    assert numbers(stream, 7) == [0, 1, 100, 101, 102, 0, 1]
    assert [place for place, _ in stream.first(3)] == [
        *(f"{tmp_path}/rows/0.jsonl, line 1", f"{tmp_path}/rows/0.jsonl, line 2", f"{tmp_path}/rows/1.jsonl, line 1")
    ]


@pytest.mark.parametrize("buffer", [1, 3, 7, 100])
def test_parquet_gives_the_rows_of_jsonl(tmp_path: Path, buffer: int) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"n": n, "text": "x" * (n % 3)} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=6)
    lines, groups = (RowStream([str(tmp_path / name)], buffer_rows=buffer) for name in ("rows.jsonl", "rows.parquet"))
    assert [row for _, row in islice(lines, 45)] == [row for _, row in islice(groups, 45)]
    assert groups.count_rows() == 20
    again = RowStream([str(tmp_path / "rows.parquet")], buffer_rows=buffer)
    again.load_state_dict(json.loads(json.dumps(groups.state_dict())))
    assert list(islice(again, 30)) == list(islice(groups, 30))
    assert groups.first(8)[7][0] == f"{tmp_path}/rows.parquet, row 8"


def test_data_sets_of_the_datasets_library_are_streamed(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"n": n} for n in range(17)]).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    stream = RowStream([str(tmp_path / "saved")], buffer_rows=5)
    assert stream.count_rows() is None
    assert sorted(numbers(stream, 17)) == list(range(17))
    numbers(stream, 9)
    again = RowStream([str(tmp_path / "saved")], buffer_rows=5)
    again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert list(islice(again, 20)) == list(islice(stream, 20))


def test_faults_are_named(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"n": 1}\n[2]\n')
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2 must be an object"):
        numbers(RowStream([str(rows)], shuffle=False), 2)
    rows.write_bytes(b'{"n": 1}\n{"n": "\xff"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2 is not UTF-8"):
        numbers(RowStream([str(rows)], shuffle=False), 2)
    rows.write_text("\n")
    with pytest.raises(DataError, match="there are no rows in"):
        next(RowStream([str(rows)]))
    (tmp_path / "rows.csv").write_text("n\n1\n")
    with pytest.raises(DataError, match=r"rows\.csv .*streaming=false"):
        RowStream([str(tmp_path / "rows.csv")])
    with pytest.raises(DataError, match=r"nosuch\.jsonl does not exist"):
        RowStream([str(tmp_path / "nosuch.jsonl")])
    with pytest.raises(ConfigError, match=r"shuffle_buffer \(0\)"):
        RowStream([str(rows)], buffer_rows=0)


def test_a_position_belongs_to_its_data_and_settings(tmp_path: Path) -> None:
    files = write_shards(tmp_path / "rows", [5])
    state: dict[str, Any] = RowStream(files, buffer_rows=2).state_dict()
    with pytest.raises(ConfigError, match="shuffle_buffer=2, not 3"):
        RowStream(files, buffer_rows=3).load_state_dict(state)
    Path(files[0]).write_text(Path(files[0]).read_text().replace("3", "4"))
    with pytest.raises(ConfigError, match="has data="):
        RowStream(files, buffer_rows=2).load_state_dict(state)


READ = """
import resource, sys
from ludic.data.row_stream import RowStream
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = RowStream([sys.argv[1]], buffer_rows=100)
count = rows.count_rows()
for _ in range(count + 10):
    next(rows)
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_is_that_of_the_buffer_and_not_of_the_file(tmp_path: Path) -> None:
    """128 MiB of rows of 16 KiB, with a buffer of 100 rows, 1.6 MB: the process may grow by a
    quarter of the file, and grows by far less."""
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for n in range(8192):
            file.write(json.dumps({"n": n, "text": f"{n:06d}" * 2730}) + "\n")
    size_kb = path.stat().st_size // 1024
    assert size_kb > 128 * 1024
    shown = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True, timeout=300)
    count, grown_kb = map(int, shown.stdout.split())
    assert count == 8192
    assert grown_kb < size_kb / 4, f"the process grew by {grown_kb} KiB over a file of {size_kb} KiB"


@pytest.mark.parametrize("name", ["more.jsonl.gz", "more.json", "more.txt", "test-0.jsonl", "Validation.jsonl"])
def test_a_folder_with_files_that_would_be_left_out_or_are_held_out_is_refused(tmp_path: Path, name: str) -> None:
    write_shards(tmp_path / "rows", [2])
    (tmp_path / "rows" / name).write_text('{"n": 1}\n')
    with pytest.raises(DataError, match=f"has {name}, which .* name the files"):
        RowStream([str(tmp_path / "rows")], buffer_rows=4, seed=0)


def test_a_folder_is_read_whole_whatever_the_case_of_its_names_and_with_a_readme(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    write_shards(folder, [2])
    (folder / "MORE.JSONL").write_text('{"n": 7}\n')
    (folder / "README.md").write_text("rows")
    (folder / ".hidden").write_text("x")
    assert sorted(numbers(RowStream([str(folder)], buffer_rows=4, seed=0), 3)) == [0, 1, 7]
