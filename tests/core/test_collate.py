"""The layouts that the core writes, compared with collation one value at a time."""

import array
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import collation_oracle as oracle
import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic import _core
from ludic.errors import ConfigError, DataError, DataTypeError
from ludic.training.types import SAWItem

DTYPES = {
    "input_ids": np.int64,
    "attention_mask": np.int64,
    "position_ids": np.int64,
    "action_mask": np.float32,
    "weight": np.float32,
    "actor_logps": np.float32,
    "old_logp_action": np.float32,
    "cu_seqlens": np.int32,
}
batches = oracle.items(min_size=1).flatmap(
    lambda items: st.tuples(st.just(items), st.lists(st.integers(0, len(items) - 1), min_size=1, max_size=6), st.integers(1, 45))
)


def table_of(*lengths: int) -> _core.SampleTable:
    offsets = np.cumsum([0, *lengths])
    ids = np.arange(offsets[-1])
    return _core.SampleTable.from_columns(ids, np.ones_like(ids), offsets)


@given(batches)
def test_padded_equals_collation_one_value_at_a_time(batch: tuple[list[SAWItem], list[int], int]) -> None:
    items, indices, max_seq_len = batch
    got = _core.SampleTable.from_items(items).truncate(max_seq_len).collate(indices, oracle.PAD)
    cut = [oracle.truncate_right(items[index], max_seq_len) for index in indices]
    if "old_logp_action" in got:
        sums = [sum(oracle.aligned_logps(sample)) for sample in cut]
        assert got.pop("old_logp_action").tolist() == pytest.approx(sums, rel=1e-6)
    assert {name: values.tolist() for name, values in got.items()} == oracle.collate(cut)
    assert all(values.dtype == DTYPES[name] for name, values in got.items())


@given(batches)
def test_collate_then_uncollate_is_the_identity(batch: tuple[list[SAWItem], list[int], int]) -> None:
    items, indices, max_seq_len = batch
    got = _core.SampleTable.from_items(items).truncate(max_seq_len).collate(indices, oracle.PAD)
    for row, index in enumerate(indices):
        sample = oracle.truncate_right(items[index], max_seq_len)
        there = got["attention_mask"][row] == 1
        action = got["action_mask"][row] == 1
        assert got["input_ids"][row][there].tolist() == sample.input_ids
        assert got["action_mask"][row][there].tolist() == sample.action_mask
        if sample.actor_logps is not None:
            assert got["actor_logps"][row][action].tolist() == sample.actor_logps.token_logps
        assert (got["input_ids"][row][~there] == oracle.PAD).all()


@given(batches)
def test_padding_free_concatenates_the_samples(batch: tuple[list[SAWItem], list[int], int]) -> None:
    items, indices, max_seq_len = batch
    got = _core.SampleTable.from_items(items).truncate(max_seq_len).collate_padding_free(indices)
    cut = [oracle.truncate_right(items[index], max_seq_len) for index in indices]
    lengths = [len(sample.input_ids) for sample in cut]
    assert got["cu_seqlens"].tolist() == np.cumsum([0, *lengths]).tolist()
    assert (got["max_seqlen"], type(got["max_seqlen"])) == (max(lengths), int)
    assert got["input_ids"].tolist() == [[token for sample in cut for token in sample.input_ids]]
    assert got["position_ids"].tolist() == [[position for length in lengths for position in range(length)]]
    assert got["action_mask"].tolist() == [[bit for sample in cut for bit in sample.action_mask]]
    assert got["weight"].tolist() == [sample.weight for sample in cut]
    if cut[0].actor_logps is not None:
        assert got["actor_logps"].tolist() == [[logp for sample in cut for logp in oracle.aligned_logps(sample)]]
    assert all(values.dtype == DTYPES[name] for name, values in got.items() if name != "max_seqlen")


@given(batches)
def test_compact_has_the_same_content_as_padded(batch: tuple[list[SAWItem], list[int], int]) -> None:
    items, indices, max_seq_len = batch
    table = _core.SampleTable.from_items(items).truncate(max_seq_len)
    compact, padded = table.collate_compact(indices, oracle.PAD), table.collate(indices, oracle.PAD)
    columns = np.arange(padded["input_ids"].shape[1])
    attended = columns < compact.pop("lengths")[:, None]
    np.testing.assert_array_equal(attended, padded.pop("attention_mask"))
    assert compact["input_ids"].dtype == np.int32
    assert compact["action_mask"].dtype == np.uint8
    for name, values in padded.items():
        np.testing.assert_array_equal(compact[name], values)


@given(batches, st.integers(1, 4))
def test_an_arena_does_not_change_the_result(batch: tuple[list[SAWItem], list[int], int], slots: int) -> None:
    items, indices, max_seq_len = batch
    table = _core.SampleTable.from_items(items).truncate(max_seq_len)
    arena = _core.Arena(slots)
    for rows in (indices, indices[:1], indices):
        for collate in (
            lambda arena, rows=rows: table.collate(rows, oracle.PAD, arena),
            lambda arena, rows=rows: table.collate_padding_free(rows, arena),
            lambda arena, rows=rows: table.collate_compact(rows, oracle.PAD, arena),
        ):
            fresh, reused = collate(None), collate(arena)
            assert fresh.keys() == reused.keys()
            for name, values in fresh.items():
                np.testing.assert_array_equal(values, reused[name])
                assert np.asarray(values).dtype == np.asarray(reused[name]).dtype


def test_an_arena_reuses_an_array_after_as_many_collations_as_it_has_slots() -> None:
    table, arena = table_of(4, 4, 4), _core.Arena(slots=2)
    first = table.collate([0], 0, arena)["input_ids"]
    table.collate([1], 0, arena)
    assert first.tolist() == [[0, 1, 2, 3]]
    table.collate([2], 0, arena)
    assert first.tolist() == [[8, 9, 10, 11]]


def test_an_array_outlives_its_arena_and_a_buffer_that_grew() -> None:
    table, arena = table_of(4, 400), _core.Arena(slots=1)
    small = table.collate([0], 0, arena)["input_ids"]
    large = table.collate([1], 0, arena)["input_ids"]
    del arena
    assert small.tolist() == [[0, 1, 2, 3]]
    assert large[0, -1] == 403


def test_arrays_are_writeable_and_own_their_memory() -> None:
    table = table_of(3)
    first, second = table.collate([0], 0), table.collate([0], 0)
    first["input_ids"][:] = 7
    assert second["input_ids"].tolist() == [[0, 1, 2]]


def test_the_longest_line_includes_all_samples_that_share_it() -> None:
    # Two turns of a dialogue on a line of 4 tokens, and a single sample of 3.
    ids, mask = [5, 6, 5, 6, 7, 8, 1, 2, 3], [0, 1, 0, 0, 0, 1, 1, 1, 1]
    table = _core.SampleTable.from_columns(ids, mask, [0, 2, 6, 9]).chained()
    packed = table.collate_padding_free([0, 1, 2])
    assert (packed["cu_seqlens"].tolist(), packed["max_seqlen"]) == ([0, 4, 7], 4)
    assert table.collate_padding_free([2])["max_seqlen"] == 3


@pytest.mark.parametrize("slots", [0, -1, 1025, 2**40, 2**62, 2**70])
def test_an_arena_has_from_1_to_1024_slots(slots: int) -> None:
    with pytest.raises(ConfigError, match=r"slots \(-?\d+\) .*1 to 1024"):
        _core.Arena(slots)


def test_an_arena_can_be_used_by_one_thread_at_a_time() -> None:
    table, arena = table_of(*[1024] * 8192), _core.Arena()
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(table.collate, np.arange(8192), 0, arena) for _ in range(8)]
    refused = [error for error in (future.exception() for future in done) if error is not None]
    assert len(refused) < len(done)
    assert all(isinstance(error, ConfigError) and "arena of its own" in str(error) for error in refused)


class Tensorlike:
    """Has no buffer but converts to an array, as tensors do."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __array__(self, *_: object, **__: object) -> np.ndarray[Any, Any]:
        return np.array(self.values)


MASKS = [
    [True, False, True],
    np.array([True, False, True]),
    (True, False, True),
    list(np.array([True, False, True])),
    memoryview(np.array([True, False, True])),
    Tensorlike([True, False, True]),
    b"\0\1",
    bytearray(b"\0\1"),
]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
def test_a_mask_is_not_a_list_of_indices(mask: Any) -> None:
    table = table_of(3, 3, 3)
    for take in (
        table.select,
        lambda rows: table.collate(rows, 0),
        table.collate_padding_free,
        lambda rows: table.collate_compact(rows, 0),
        lambda offsets: _core.SampleTable.from_columns([1], [1], offsets),
    ):
        with pytest.raises(DataTypeError, match=r"(indices|offsets).* np\.flatnonzero\(mask\)"):
            take(mask)


@pytest.mark.parametrize(
    "indices",
    [range(2), (0, 1), np.arange(2, dtype=np.uint8), Tensorlike([0, 1]), array.array("h", [0, 1])],
)
def test_indices_can_be_any_sequence_of_integers(indices: Any) -> None:
    assert table_of(1, 2).select(indices).lengths.tolist() == [1, 2]


@pytest.mark.parametrize("nothing", [[], (), range(0), np.array([]), Tensorlike([])])
def test_no_indices_select_nothing(nothing: Any) -> None:
    assert len(table_of(1, 2).select(nothing)) == 0


def test_tensors_are_read_through_their_arrays() -> None:
    torch = pytest.importorskip("torch")
    table = _core.SampleTable.from_columns(torch.arange(3), torch.tensor([False, True, True]), torch.tensor([0, 1, 3]))
    assert table.select(torch.tensor([1])).collate([0], 0)["input_ids"].tolist() == [[1, 2]]
    with pytest.raises(RuntimeError, match="detach"):
        _core.SampleTable.from_columns([1], [1], [0, 1], weights=torch.ones(1, requires_grad=True))


def test_a_batch_that_only_padding_makes_too_large_can_be_packed() -> None:
    table = table_of(*[1] * 3000, 1 << 20)
    assert table.collate_padding_free(range(3001))["input_ids"].shape == (1, 1_051_576)
    with pytest.raises(DataError, match="3001 rows by 1048576 tokens"):
        table.collate(range(3001), 0)


def test_only_the_padded_layout_keeps_gaps_in_the_attention_mask() -> None:
    table = _core.SampleTable.from_columns([1, 2, 3, 4], [0, 1, 0, 1], [0, 2, 4], attention_mask=[1, 1, 0, 1])
    assert table.collate([1, 0], 0)["attention_mask"].tolist() == [[0, 1], [1, 1]]
    assert table.collate_padding_free([0])["input_ids"].tolist() == [[1, 2]]
    with pytest.raises(DataError, match=r"index 1: attention_mask is 0 .* padded"):
        table.collate_padding_free([0, 1])
    with pytest.raises(DataError, match="index 1"):
        table.collate_compact([1], 0)


@pytest.mark.parametrize("indices", [[2], [-1], [2**70], np.array([-(2**63)]), np.array([2**64 - 1], np.uint64)])
def test_an_index_out_of_range_is_refused(indices: list[int]) -> None:
    with pytest.raises(DataError, match="ind"):
        table_of(3, 3).collate(indices, 0)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        table_of(3).collate([], 0)


@pytest.mark.parametrize("pad", [-1, 2**31, 2**70])
def test_an_invalid_padding_token_is_refused(pad: int) -> None:
    with pytest.raises(ConfigError, match="pad_token_id"):
        table_of(3).collate([0], pad)


def test_a_size_beyond_32_bits_is_refused_before_memory_is_allocated() -> None:
    table = table_of(1000)
    rows = np.zeros(10_000_000, np.int64)
    for collate in (
        lambda: table.collate(rows, 0),
        lambda: table.collate_padding_free(rows),
        lambda: table.collate_compact(rows, 0),
    ):
        with pytest.raises(DataError, match="10000000 rows"):
            collate()
