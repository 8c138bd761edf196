"""Batches in a checkpoint come back as they were, types included."""

import base64

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic.errors import CheckpointError, DataError, DataTypeError
from ludic.training.batching.overlapped import OverlappedSource
from ludic.training.batching.sample_codec import decode_batch, encode_batch
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
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6))
    mask = [draw(st.integers(0, 1)) for _ in ids]
    make = draw(st.sampled_from([list, as_array(np.int32), as_array(np.int64)]))
    logps = draw(st.none() | st.lists(st.floats(-50, 0), min_size=sum(mask), max_size=sum(mask)))
    kept = None if logps is None else ActorTokenLogps(draw(st.sampled_from([list, as_array(np.float32)]))(logps))
    fractions = draw(st.none() | st.lists(st.floats(2**-20, 2), min_size=sum(mask), max_size=sum(mask)))
    attached = SampleAttachments(kept, action_fractions=fractions)
    return SAWItem(make(ids), make([1] * len(ids)), make(mask), draw(st.floats(-1e30, 1e30)), draw(META), attached)


def content(sequence):
    return (type(sequence), getattr(sequence, "dtype", None), list(sequence))


def facts(item):
    logps = item.attachments.actor_logps
    sequences = [item.input_ids, item.attention_mask, item.action_mask, [] if logps is None else logps.token_logps]
    return [content(sequence) for sequence in sequences], logps is None, item.attachments.action_fractions, item.weight, item.meta


def stored_and_read(batch):
    return decode_batch(*encode_batch(batch, is_exact=True))


@given(st.lists(items(), max_size=3), META)
def test_batches_come_back_as_they_were(samples, meta):
    again = stored_and_read(SAWBatch(samples, meta))
    assert (list(map(facts, again.items)), again.meta) == (list(map(facts, samples)), meta)


@pytest.mark.parametrize(
    ("item", "plain"),
    [
        (SAWItem([1, 2], [True, True], [False, True], 1.0), SAWItem([1, 2], [1, 1], [0, 1], 1.0)),
        (SAWItem([np.int64(1)], [1], [1], np.float64(1.0)), SAWItem([1], [1], [1], 1.0)),
        (SAWItem((1, 2), (1, 1), (0, 1), 1), SAWItem([1, 2], [1, 1], [0, 1], 1.0)),
    ],
)
def test_numbers_of_other_types_come_back_as_numbers_of_python(item, plain):
    [again] = stored_and_read(SAWBatch([item])).items
    assert facts(again) == facts(plain)
    assert {type(each) for each in (*again.input_ids, *again.action_mask)} == {int}
    assert type(again.weight) is float


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, {1}, np.float32(1.0), 1 + 2j, {"in": [{"it": (1,)}]}])
def test_metadata_that_would_come_back_changed_is_refused(value):
    with pytest.raises(DataError, match=r"meta .*odd.* is a .*cannot be stored"):
        stored_and_read(SAWBatch([], {"odd": value}))


class OwnItem(SAWItem):
    pass


@pytest.mark.parametrize(
    ("item", "error", "said"),
    [
        (SAWItem([1], [1], [1], 1.0, meta={"action": "\ud800"}), DataError, "'action' in the meta of sample 0"),
        (SAWItem([1], [1], [1], 1.0, meta={"seed": 2**64}), DataError, "'seed' in the meta of sample 0"),
        (SAWItem(range(1), [1], [1], 1.0), DataError, "a sequence is a range"),
        (SAWItem(np.ones((2, 2), int), [1], [1], 1.0), DataTypeError, "sample 0: input_ids"),
        (OwnItem([1], [1], [1], 1.0), DataError, "OwnItem cannot .*stored: .*own fields"),
    ],
)
def test_samples_that_would_come_back_changed_or_not_at_all_are_refused(item, error, said):
    with pytest.raises(error, match=said):
        stored_and_read(SAWBatch([item]))


class Refusing:
    async def next_batch(self):
        raise NotImplementedError


HEAD, TABLE = encode_batch(SAWBatch([SAWItem([1, 2], [1, 1], [0, 1], 1.0, {"n": 1})]), is_exact=True)


def load(pending):
    OverlappedSource(Refusing()).load_state_dict({"pending_batches": pending, "states_after_pending": [{}]})


def as_text(*parts):
    return [base64.b64encode(part).decode() for part in parts]


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_other_bytes_are_refused(head, table):
    load([as_text(HEAD, TABLE)])
    for pending in (
        [as_text(head, TABLE)],
        [as_text(HEAD, table)],
        [as_text(HEAD[:-1], TABLE)],
        [as_text(HEAD)],
        ["="],
        [["="]],
        3,
    ):
        with pytest.raises(CheckpointError, match=r"pending batches .*cannot be read: .*; resume with"):
            load(pending)


def test_pending_batches_of_the_first_version_are_refused_with_both_versions():
    with pytest.raises(CheckpointError, match=r"version 1, .*reads 5; resume with the ludic"):
        load(base64.b64encode(b"\x92\x01\x90").decode())
