"""A batch that went to other ranks as columns has the same samples."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from training_samples import sorting_items

from ludic.errors import DataError, DataTypeError
from ludic.training.batching.mini_batches import MacroBatch
from ludic.training.batching.sample_codec import decode_batch, encode_batch
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWBatch, SAWItem

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=5), parts, max_size=3),
    max_leaves=3,
)
META = st.dictionaries(st.text(max_size=2), PLAIN, max_size=2)


def as_array(dtype):
    return lambda values: np.asarray(values, dtype=dtype)


FRACTION = st.floats(2**-20, 8)


@st.composite
def items(draw):
    """Up to 3 samples, all or none of them with log-probabilities."""
    with_logps = draw(st.booleans())
    return [draw(item(with_logps)) for _ in range(draw(st.integers(0, 3)))]


@st.composite
def item(draw, with_logps):
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6))
    mask = [draw(st.integers(0, 1)) for _ in ids]
    attention = [1] * len(ids) if draw(st.booleans()) else [draw(st.integers(0, 1)) for _ in ids]
    make = draw(st.sampled_from([list, tuple, as_array(np.int32), as_array(np.int64)]))
    logps = draw(st.lists(st.floats(-50, 0, width=32), min_size=sum(mask), max_size=sum(mask)))
    made = draw(st.sampled_from([list, as_array(np.float32)]))(logps)
    fractions = draw(st.none() | st.lists(FRACTION, min_size=sum(mask), max_size=sum(mask)))
    attached = SampleAttachments(ActorTokenLogps(made) if with_logps else None, action_fractions=fractions)
    weight = draw(st.floats(-1e30, 1e30))
    return SAWItem(make(ids), make(attention), make(mask), weight, draw(META), attached)


def facts(item):
    logps, fractions = item.attachments.actor_logps, item.attachments.action_fractions
    sequences = [item.input_ids, item.attention_mask, item.action_mask, [None] if fractions is None else fractions]
    return [list(each) for each in sequences], None if logps is None else list(logps.token_logps), item.weight, item.meta


@settings(deadline=None)
@given(items(), META)
def test_samples_come_back_as_they_were(samples, meta):
    again = decode_batch(*encode_batch(SAWBatch(samples, meta)))
    assert list(map(facts, again.items)) == list(map(facts, samples))
    assert again.meta == meta


def test_a_decoded_batch_is_ingested_as_the_batch_itself():
    samples = sorting_items(9, seed=1)
    decoded = decode_batch(*encode_batch(SAWBatch(samples))).items
    for max_seq_len in (32, 6):
        [here, there] = [MacroBatch.ingest(each, max_seq_len) for each in (samples, decoded)]
        rows = np.arange(len(here.items))
        columns, others = here.table.collate(rows, 0), there.table.collate(rows, 0)
        assert all(np.array_equal(columns[name], others[name]) for name in columns)
        assert [item.meta for item in here.items] == [item.meta for item in there.items]
        assert here.counts() == there.counts()


def test_tuples_and_numbers_of_numpy_become_what_msgpack_has():
    meta = {"pair": (1, 2), "number": np.float32(0.5), "array": np.arange(2), "by_number": {3: "x"}}
    [item] = decode_batch(*encode_batch(SAWBatch([SAWItem([1], [1], [1], np.float32(2.0), meta)]))).items
    assert item.meta == {"pair": [1, 2], "number": 0.5, "array": [0, 1], "by_number": {3: "x"}}
    assert item.weight == 2.0


def test_units_that_are_named_by_tuples_are_grouped_as_in_one_process():
    names = [(1, 2), (1, (2, 3)), (1, 2)]
    metas = [{"request_meta": {"group_id": name}, "pair_id": name, "rollout_id": name} for name in names]
    for keys in (("request_meta", "pair_id", "rollout_id"), ("pair_id", "rollout_id"), ("rollout_id",)):
        samples = [SAWItem([1, 2], [1, 1], [0, 1], 1.0, {key: meta[key] for key in keys}) for meta in metas]
        decoded = decode_batch(*encode_batch(SAWBatch(samples))).items
        assert [item.meta for item in decoded] == [item.meta for item in samples]
        assert MacroBatch.ingest(decoded, 2).groups() == MacroBatch.ingest(samples, 2).groups() == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        (SAWItem([1, 2], [1, 1], [1], 1.0), DataError, "sample 0.*action_mask"),
        (SAWItem([2**31], [1], [1], 1.0), DataError, "sample 0.*input_ids"),
        (SAWItem([0.5], [1], [1], 1.0), DataTypeError, "sample 0.*input_ids"),
        (SAWItem([1], [1], [1], float("nan")), DataError, "sample 0.*weight"),
        (
            SAWItem([1], [1], [1], 1.0, {"fine": 1, "odd": {"in": object()}}),
            DataError,
            "'odd' in the meta .*sample 0 .*a object",
        ),
        (
            SAWItem([1], [1], [1], 1.0, {"fine": 1, "long": 2**70}),
            DataError,
            "'long' in the meta of sample 0",
        ),
    ],
)
def test_what_cannot_be_sent_is_named(item, error, message):
    with pytest.raises(error, match=message):
        encode_batch(SAWBatch([item]))


def test_a_message_of_another_version_is_refused():
    head, table = encode_batch(SAWBatch(sorting_items(2)))
    fields = msgspec.msgpack.decode(head)
    with pytest.raises(DataError, match="version 7, this ludic reads 5"):
        decode_batch(msgspec.msgpack.encode([7, *fields[1:]]), table)
    for damaged in ((head[:-1], table), (head, table[:-1]), (head, table[:20]), (head, b"no table"), (head, b"no")):
        with pytest.raises(DataError, match="cannot be read"):
            decode_batch(*damaged)
