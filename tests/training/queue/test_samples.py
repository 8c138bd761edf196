"""Entries of samples: what is decoded is what was encoded, and nothing else is accepted."""

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings, strategies as st

from ludic.training.batching.sample_codec import PackedSamples
from ludic.training.queue.entries import EntryError, EntryLimits, SampleGroup, decode_samples, encode_samples, split_groups
from ludic.training.rollouts.episodes import SampleCheck
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWItem

FINITE = st.floats(allow_nan=False, allow_infinity=False)
LOGPS = st.floats(-50, 0)
VALUES = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | FINITE | st.text(max_size=5)
META = st.dictionaries(st.text(max_size=5).map(lambda name: f"x{name}"), VALUES | st.lists(VALUES, max_size=2), max_size=2)


@st.composite
def samples(draw):
    length = draw(st.integers(1, 9))
    bits = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    actions = draw(bits)
    logps = draw(st.none() | st.lists(LOGPS, min_size=sum(actions), max_size=sum(actions)))
    return SAWItem(
        draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)),
        draw(st.just([1] * length) | bits),
        actions,
        draw(st.floats(width=32, allow_nan=False, allow_infinity=False)),
        {**draw(META), "rollout_id": "r", "policy_version": draw(st.none() | st.integers(0, 9))},
        SampleAttachments(
            None if logps is None else ActorTokenLogps(logps),
            action_fractions=draw(st.none() | st.lists(st.floats(2**-20, 8), min_size=sum(actions), max_size=sum(actions))),
        ),
    )


GROUPS = st.builds(SampleGroup, st.text(max_size=9), st.integers(0, 2**62), st.lists(samples(), min_size=1, max_size=2))


@given(group=GROUPS)
def test_what_is_decoded_is_what_was_encoded(group):
    assert decode_samples(encode_samples(group)) == group


def item(**changes):
    settings = {"input_ids": [5, 6, 7], "attention_mask": [1] * 3, "action_mask": [0, 1, 1], "weight": 0.5, "meta": {}, **changes}
    return SAWItem(**settings)


def test_arrays_come_back_as_lists():
    arrays = item(
        input_ids=np.array([5, 6, 7]),
        action_mask=np.array([0, 1, 1]),
        attachments=SampleAttachments(ActorTokenLogps(np.array([-0.5, -0.25], dtype=np.float32))),
    )
    assert decode_samples(encode_samples(SampleGroup("p", 0, [arrays]))).items == [
        item(attachments=SampleAttachments(ActorTokenLogps([-0.5, -0.25])))
    ]


@pytest.mark.parametrize(
    ("items", "problem"),
    [
        ([], "has 0 samples"),
        ([item(weight=float("nan"))], "sample 0: weight is NaN, .*finite"),
        ([item(weight=1e39)], "sample 0: weight is 1e39, .*finite"),
        ([item(input_ids=[], attention_mask=[], action_mask=[])], "sample 0 has no tokens"),
        ([item(attachments=SampleAttachments(ActorTokenLogps([-0.5, 5.0])))], "log-probability 5; .*at most 0"),
        ([item(meta={"policy_version": -1})], r"policy_version -1; .*from 0"),
        ([item(meta={"policy_version": 2**62})], rf"policy_version {2**62}; .*0 to 2147483647"),
        ([item(meta={"total_reward": 1e300})], "total_reward of a sample is 1e[+]300"),
        ([item(action_mask=[0, 1])], "action_mask has length 2 .*input_ids has length 3"),
        ([item(action_mask=[0, 1, 2])], r"action_mask\[2\] is 2, .*0 and 1"),
        ([item(input_ids=[5, 6, -1])], r"input_ids\[2\] is -1, .*token id"),
        ([item(input_ids=[5, 6, 2**40])], r"input_ids\[2\] is 1099511627776"),
        ([item(attachments=SampleAttachments(ActorTokenLogps([-0.5])))], "sample 0 .*1 actor_logps for 2"),
        ([item(attachments=SampleAttachments(ActorTokenLogps([-0.5, float("-inf")])))], "must be finite"),
        ([item(attachments=SampleAttachments(action_fractions=[0.5]))], "sample 0 .*1 action_fractions for 2"),
        ([item(attachments=SampleAttachments(action_fractions=[0.5, 0.0]))], r"action_fractions\[1\] of sample 0 is 0.0"),
        ([item(meta={"total_reward": float("nan")})], "total_reward of a sample is nan"),
        ([item(meta={"policy_version": "3"})], "policy_version '3'; .*whole number"),
        ([item(meta={"request_meta": [1]})], "request_meta"),
        ([item(meta={"request_meta": {"group_id": [1]}})], "group_id of a sample is a list"),
        ([item(meta={"rollout_id": [1]})], "rollout_id"),
        ([item(meta={"request_meta": {"group_id": each}}) for each in "ab"], "several groups"),
    ],
)
def test_what_cannot_be_trained_on_is_not_sent(items, problem):
    with pytest.raises(EntryError, match=problem):
        encode_samples(SampleGroup("p", 0, items))


def test_limits_are_kept():
    with pytest.raises(EntryError, match="larger than the limit of 100"):
        encode_samples(SampleGroup("p", 0, [item(meta={"text": "x" * 200})]), EntryLimits(max_bytes=100))
    with pytest.raises(EntryError, match="1 to 2"):
        encode_samples(SampleGroup("p", 0, [item()] * 3), EntryLimits(max_rollouts=2))
    payload = encode_samples(SampleGroup("p", 0, [item()]))
    with pytest.raises(EntryError, match=r"token id 7, .*vocabulary has 7"):
        decode_samples(payload, check=SampleCheck(vocab_size=7))


WHOLE = encode_samples(SampleGroup("p", 3, [item(meta={"rollout_id": "r"}), item()]))


def resealed(body):
    """An entry with this body and the right checksum."""
    return WHOLE[:6] + xxhash.xxh3_128_digest(body) + body


def floats(*values):
    return np.array(values, np.float64).tobytes()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"weights": floats(0.5, np.nan)}, "weight of a sample is nan; .*finite"),
        ({"weights": floats(0.5, 1e39)}, "the weight of a sample is 1e[+]39"),
        ({"weights": floats(0.5)}, "the samples cannot be read"),
        ({"meta": [{}, {3: 4}]}, "metadata .*a key .*no text"),
        ({"logps": [b"\1\1", "<f8", floats(-1, -1, -1)]}, "3 numbers for 4 action tokens"),
        ({"logps": [b"\1", "<f8", floats(-1, -1)]}, "the samples cannot be read"),
        ({"logps": [b"\0\1", "|O", floats(-1, -1)]}, "has another structure"),
        ({"fractions": [b"\0\1", "<f8", floats(0.5, np.inf)]}, r"action_fractions\[1\] of sample 1 is inf"),
    ],
)
def test_a_forged_entry_is_refused_by_the_receiver(changes, problem):
    producer, sequence, samples, table, images = msgspec.msgpack.decode(WHOLE[22:])
    forged = {**dict(zip(PackedSamples.__struct_fields__, samples, strict=True)), **changes}
    with pytest.raises(EntryError, match=problem):
        decode_samples(resealed(msgspec.msgpack.encode([producer, sequence, list(forged.values()), table, images])))
    wide = table.replace(b'"I32"', b'"I64"')
    with pytest.raises(EntryError, match="the samples cannot be read"):
        decode_samples(resealed(msgspec.msgpack.encode([producer, sequence, samples, wide, images])))


@settings(max_examples=2 * settings.default.max_examples)
@given(data=st.data())
def test_changed_bytes_are_refused_or_still_a_group(data):
    """A changed byte is refused. A changed body with a right checksum, as a hostile sender makes
    it, is refused or is a group that can be encoded: no other error comes out."""
    position = data.draw(st.integers(0, len(WHOLE) - 1))
    changed = bytearray(WHOLE)
    changed[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(EntryError):
        decode_samples(bytes(changed))
    refuse_or_accept(resealed(bytes(changed)[22:]))


@settings(max_examples=2 * settings.default.max_examples)
@given(body=st.binary(max_size=60) | st.builds(msgspec.msgpack.encode, st.lists(VALUES | st.binary(max_size=9), max_size=4)))
def test_any_bytes_are_refused_or_a_group(body):
    refuse_or_accept(resealed(body))
    refuse_or_accept(body)


def refuse_or_accept(payload):
    try:
        group = decode_samples(payload)
    except EntryError:
        return
    encode_samples(group)


def test_groups_are_split_in_the_order_in_which_they_begin():
    def of(group, rollout):
        return item(meta={"rollout_id": rollout, "request_meta": {} if group is None else {"group_id": group}})

    items = [of("a", 1), of("b", 2), of("a", 3), of(None, 4), of("b", 2), of(None, 4), of(None, 5)]
    assert [[each.meta["rollout_id"] for each in group] for group in split_groups(items)] == [[1, 3], [2, 2], [4, 4], [5]]
