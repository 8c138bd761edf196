"""Batches in a checkpoint come back as they were, types included."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic.errors import CheckpointError, DataError
from ludic.training.batching.overlapped import decode_batches, encode_batches
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWBatch, SAWItem

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=5), parts, max_size=3),
    max_leaves=8,
)
META = st.dictionaries(st.text(max_size=5), PLAIN, max_size=4)


def as_array(dtype):
    return lambda values: np.asarray(values, dtype=dtype)


@st.composite
def items(draw):
    ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=6))
    mask = [draw(st.integers(0, 1)) for _ in ids]
    make = draw(st.sampled_from([list, as_array(np.int32), as_array(np.int64)]))
    logps = draw(st.none() | st.lists(st.floats(-50, 0), min_size=sum(mask), max_size=sum(mask)))
    kept = None if logps is None else ActorTokenLogps(draw(st.sampled_from([list, as_array(np.float32)]))(logps))
    fractions = draw(st.none() | st.lists(st.floats(0, 2), min_size=sum(mask), max_size=sum(mask)))
    attached = SampleAttachments(kept, action_fractions=fractions)
    return SAWItem(make(ids), make([1] * len(ids)), make(mask), draw(st.floats(allow_nan=False)), draw(META), attached)


def content(sequence):
    return (type(sequence), getattr(sequence, "dtype", None), list(sequence))


def facts(item):
    logps = item.attachments.actor_logps
    sequences = [item.input_ids, item.attention_mask, item.action_mask, [] if logps is None else logps.token_logps]
    return [content(sequence) for sequence in sequences], logps is None, item.attachments.action_fractions, item.weight, item.meta


@given(st.lists(st.tuples(st.lists(items(), max_size=3), META), max_size=3))
def test_batches_come_back_as_they_were(parts):
    batches = [SAWBatch(samples, meta) for samples, meta in parts]
    again = decode_batches(encode_batches(batches))
    assert [(list(map(facts, batch.items)), batch.meta) for batch in again] == [
        (list(map(facts, batch.items)), batch.meta) for batch in batches
    ]


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, {1}, np.float32(1.0), 1 + 2j, {"in": [{"it": (1,)}]}])
def test_metadata_that_would_come_back_changed_is_refused(value):
    with pytest.raises(DataError, match=r"meta of the batch: odd.* is a .*, which cannot be stored"):
        encode_batches([SAWBatch([], {"odd": value})])


class OwnItem(SAWItem):
    pass


@pytest.mark.parametrize(
    "item",
    [
        SAWItem([1, 2], [1, 1], [False, True], 1.0),
        SAWItem([np.int64(1)], [1], [1], 1.0),
        SAWItem([1], [1], [1], np.float64(1.0)),
        SAWItem([1], [1], [1], 1.0, meta={"action": "\ud800"}),
        SAWItem([1], [1], [1], 1.0, meta={"seed": 2**64}),
        SAWItem(np.ones((2, 2), int), [1], [1], 1.0),
        OwnItem([1], [1], [1], 1.0),
    ],
)
def test_samples_that_would_come_back_changed_or_not_at_all_are_refused(item):
    with pytest.raises(DataError, match="cannot be stored"):
        encode_batches([SAWBatch([item])])


@pytest.mark.parametrize(("dtype", "data"), [("|O", b"12345678"), ("<i4", b"123"), ("nonsense", b"")])
def test_an_array_of_other_bytes_is_refused(dtype, data):
    sample = [{"dtype": dtype, "data": data}, [1], [1], 1.0, {}, None]
    with pytest.raises(CheckpointError, match="the stored batches are damaged"):
        decode_batches(msgspec.msgpack.encode([1, [[[sample], {}]]]))


@given(st.binary(max_size=60))
def test_other_bytes_are_refused(data):
    try:
        decode_batches(data)
    except CheckpointError:
        return
    assert data == encode_batches(decode_batches(data))  # hypothesis wrote a valid file


def test_bytes_of_another_version_are_refused_with_both_versions(monkeypatch):
    monkeypatch.setattr("ludic.training.batching.overlapped.VERSION", 2)
    data = encode_batches([])
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="have version 2, this ludic reads 1"):
        decode_batches(data)
