"""Batches of a stream: which samples they have, and that they resume."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ludic.data.row_stream import RowStream
from ludic.errors import ConfigError
from ludic.training.batching.streamed import StreamedBatchSource
from ludic.training.types import SAWItem

COUNTS = st.lists(st.integers(0, 3), min_size=1, max_size=8).filter(any)


def make(row: dict[str, Any], where: str) -> list[SAWItem]:
    """`samples` samples of a row, with its number and theirs as tokens."""
    one = np.ones(2, dtype=np.int32)
    return [
        SAWItem(np.array([row["n"], index], dtype=np.int32), one, one, 1.0, {"rollout_id": where, "completion_length": 2})
        for index in range(row["samples"])
    ]


def source_of(path: Path, *, buffer: int, batch_size: int) -> StreamedBatchSource:
    rows = RowStream([str(path)], buffer_rows=buffer)
    return StreamedBatchSource(rows, make, batch_size=batch_size, count=lambda item: {"tokens": len(item.input_ids)})


def take(source: StreamedBatchSource, batches: int) -> list[list[list[int]]]:
    return [[list(map(int, item.input_ids)) for item in asyncio.run(source.next_batch()).items] for _ in range(batches)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(counts=COUNTS, buffer=st.integers(1, 5), batch_size=st.integers(1, 4), before=st.integers(0, 6))
def test_a_resumed_source_returns_the_next_sample(
    tmp_path: Path, counts: list[int], buffer: int, batch_size: int, before: int
) -> None:
    """Also in the middle of a row's samples, after rows without any, and over the end of a pass."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": n, "samples": count}) + "\n" for n, count in enumerate(counts)))
    first, second = source_of(path, buffer=buffer, batch_size=batch_size), source_of(path, buffer=buffer, batch_size=batch_size)
    begun = take(first, before)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    following = take(first, 5)
    assert take(second, 5) == following
    assert second.counts == first.counts == {"tokens": 2 * batch_size * (before + 5)}
    flat = [sample for batch in [*begun, *following] for sample in batch]
    in_one_pass = sum(counts)
    for number in range(len(flat) // in_one_pass):  # each sample of the data once a pass
        of_pass = flat[number * in_one_pass : (number + 1) * in_one_pass]
        assert sorted(of_pass) == [[n, index] for n, count in enumerate(counts) for index in range(count)]


def test_a_batch_says_its_pass_and_the_state_of_another_source_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 1, "samples": 1}\n{"n": 2, "samples": 1}\n')
    source = source_of(path, buffer=2, batch_size=2)
    assert [asyncio.run(source.next_batch()).meta["epoch"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ConfigError, match="of a run without streaming"):
        source.load_state_dict({"batches": 3})


def test_a_stream_without_samples_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludic.training.batching.streamed.BARREN_ROWS", 10)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 1, "samples": 0}\n')
    with pytest.raises(ConfigError, match=r"11 rows .*make no sample"):
        take(source_of(path, buffer=2, batch_size=1), 1)
