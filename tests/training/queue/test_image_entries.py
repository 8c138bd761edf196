"""Images in entries: their bytes once a group, verified where they arrive."""

import hashlib

import msgspec
import pytest
from hostile_images import bomb_png, encode, picture
from hypothesis import given, strategies as st
from image_spans import draw_picture, parts, span_lists

from ludic.images.store import ImageStore, use_store
from ludic.training.queue import entries
from ludic.training.queue.entries import (
    GROUP,
    SAMPLES,
    EntryError,
    EntryLimits,
    Group,
    SampleGroup,
    as_played,
    decode_group,
    decode_samples,
    encode_group,
    encode_samples,
    seal,
)
from ludic.training.rollouts.to_samples import sample_from_step
from ludic.types import ImageSpan, Rollout, Step, TokenTrace

SENDER = ImageStore()
DIGESTS = [SENDER.add(draw_picture(seed)) for seed in range(3)]


@st.composite
def groups(draw):
    rollouts = []
    for number in range(draw(st.integers(1, 3))):
        steps, before = [], []
        for index in range(draw(st.integers(1, 3))):
            ids, spans = draw(span_lists(DIGESTS))
            shift = len(before) if draw(st.booleans()) else 0  # continues the step before
            spans = tuple(ImageSpan(digest, start + shift, length) for digest, start, length in spans)
            completion = draw(st.lists(st.integers(0, 250), max_size=3))
            trace = TokenTrace.from_arrays([*before[:shift], *ids], completion, images=spans)
            shown = draw(st.sampled_from(["text", parts("Look: ", DIGESTS[0]), parts(DIGESTS[2], "?")]))
            steps.append(Step(index, shown, "a", draw(st.sampled_from([None, "b", shown])), 0.5, False, False, {}, trace, 7))
            before = [*trace.prompt_token_ids, *completion]
        rollouts.append(Rollout(f"r{number}", steps, {"request_meta": {"group_id": "g"}}))
    return Group("run", 3, 1, played=as_played(rollouts))


def send(group, **keywords):
    with use_store(SENDER):
        return encode_group(group, **keywords)


def receive(payload, store=None, decode=decode_group, **keywords):
    """(what arrives, the store of the trainer)."""
    store = store or ImageStore()
    with use_store(store):
        return decode(payload, **keywords), store


def digests_of(rollouts):
    steps = [step for rollout in rollouts for step in rollout.steps]
    shown = [
        part["image"][-32:] for step in steps for obs in (step.prev_obs, step.next_obs) for part in obs or () if "image" in part
    ]
    return {*shown, *(span.digest for step in steps for span in step.trace.images)}


@given(group=groups())
def test_groups_come_back_equal_with_their_images(group):
    again, store = receive(send(group))
    assert list(again.played) == list(group.played)
    assert [step.trace.images for r in again.played for step in r.steps] == [
        step.trace.images for r in group.played for step in r.steps
    ]
    for digest in DIGESTS:
        assert store.has(digest) == (digest in digests_of(group.played))
        if store.has(digest):
            assert store.read(digest) == SENDER.read(digest)


@given(group=groups())
def test_samples_come_back_equal_with_their_images(group):
    items = [sample_from_step(rollout, step, 1.0) for rollout in group.played for step in rollout.steps]
    with use_store(SENDER):
        payload = encode_samples(SampleGroup("actor", 0, items))
    again, store = receive(payload, decode=decode_samples)
    assert [item.images for item in again.items] == [item.images for item in items]
    assert [item.input_ids for item in again.items] == [item.input_ids for item in items]
    assert all(store.has(span.digest) for item in items for span in item.images)


def one_group(digest=DIGESTS[0], count=8):
    """`count` answers to one image."""
    trace = TokenTrace([5, 259, 259, 6], [7, 2], [-0.5, -0.25], "stop", None, (ImageSpan(digest, 1, 2),))
    step = Step(0, parts(digest, "How many?"), "3", None, 1.0, False, True, {}, trace, 9)
    meta = {"request_meta": {"group_id": "g"}}
    return Group("run", 3, 1, played=as_played([Rollout(f"r{number}", [step], meta) for number in range(count)]))


def test_an_image_is_in_an_entry_once_however_many_answers_it_has():
    noise = SENDER.add(draw_picture(9).repeat(20, 0).repeat(20, 1))
    large = SENDER.add(encode(picture().resize((300, 300)), "BMP"))
    for digest in (noise, large):
        data = SENDER.read(digest)
        payload, text = send(one_group(digest)), send(one_group(digest), with_images=False)
        assert payload.count(data) == 1
        assert len(payload) < len(text) + 1.1 * len(data)
        assert data not in text


def test_an_entry_of_text_takes_a_byte_for_the_images_of_each_trace_and_one_for_their_bytes():
    for group in (one_group(),):
        for rollout in group.played:
            [step] = rollout.steps
            step.prev_obs = "text"
            step.trace = TokenTrace([5, 6], [7, 2], [-0.5, -0.25], "stop")
        body = msgspec.msgpack.decode(send(group)[22:])
        assert body[11] == {}
        assert [step[8][6] for rollout in body[7] for step in rollout[2]] == [[]] * 8


@pytest.mark.parametrize("change", ["flip", "cut", "other", "bomb", "unread"])
def test_an_image_that_is_not_the_one_of_its_digest_is_refused(change):
    data = SENDER.read(DIGESTS[0])
    other = {
        "flip": data[:60] + bytes([data[60] ^ 1]) + data[61:],
        "cut": data[:-20],
        "other": SENDER.read(DIGESTS[1]),
        "bomb": bomb_png(9000),
        "unread": encode(picture(), "BMP"),
    }[change]
    digest = DIGESTS[0] if change in ("flip", "cut", "other") else hashlib.blake2b(other, digest_size=16).hexdigest()
    content = entries._DECODER.decode(send(one_group())[22:])
    for rollout in content.rollouts:
        for step in rollout.steps:
            step.trace.images = [ImageSpan(digest, 1, 2)]
            step.prev_obs = "text"
    content.images = {digest: other}
    store = ImageStore()
    with pytest.raises(EntryError, match=f"image '{digest}' of the entry .*(damaged|Mpixel|stored as)") as caught:
        receive(seal(GROUP, content, EntryLimits()), store)
    assert str(caught.value).isprintable()
    assert not store.has(digest)


def test_one_flipped_bit_on_the_way_is_found_before_anything_is_stored():
    payload = bytearray(send(one_group()))
    at = payload.index(b"IDAT") + 10
    payload[at] ^= 1
    store = ImageStore()
    with pytest.raises(EntryError, match="checksum"):
        receive(bytes(payload), store)
    assert not store.has(DIGESTS[0])


def test_the_size_of_an_entry_with_its_images_is_limited_for_sender_and_reader():
    size = len(send(one_group()))
    exact = EntryLimits(max_bytes=size)
    assert receive(send(one_group(), limits=exact), limits=exact)[0]
    small = EntryLimits(max_bytes=size - 1)
    with pytest.raises(EntryError, match=f"the limit of {size - 1}; .*smaller images"):
        send(one_group(), limits=small)
    store = ImageStore()
    with pytest.raises(EntryError, match=f"{size} bytes, the limit"):
        receive(send(one_group()), store, limits=small)
    assert not store.has(DIGESTS[0])


def test_an_image_that_neither_the_entry_nor_the_store_has_is_refused():
    payload = send(one_group(), with_images=False)
    assert receive(payload, SENDER)[0].played
    with pytest.raises(EntryError, match=f"{DIGESTS[0]}' is not in"):
        receive(payload)
    with pytest.raises(EntryError, match=r"'0000.* is not in"):
        send(one_group("0" * 32))


@pytest.mark.parametrize("span", [("../../etc/passwd", 1, 2), (DIGESTS[0], 3, 2), (DIGESTS[0], -1, 2), (DIGESTS[0], 1, 0)])
def test_spans_that_lie_outside_of_the_prompt_are_refused(span):
    content = entries._DECODER.decode(send(one_group())[22:])
    content.rollouts[0].steps[0].trace.images = [ImageSpan(*span)]
    with pytest.raises(EntryError, match=r"images has|is not in"):
        receive(seal(GROUP, content, EntryLimits()))
    items = [sample_from_step(rollout, rollout.steps[0], 1.0) for rollout in one_group().played]
    with use_store(SENDER):
        samples = entries._SAMPLES_DECODER.decode(encode_samples(SampleGroup("a", 0, items))[22:])
    samples.samples.images[0] = [ImageSpan(span[0], span[1] + 2 * (span[1] == 3), span[2])]
    with pytest.raises(EntryError, match=r"images has|is not in"):
        receive(seal(SAMPLES, samples, EntryLimits()), decode=decode_samples)


def test_an_observation_of_other_parts_is_refused():
    for shown in ([{"type": "image", "image": "http://a.b/c.png"}], [{"type": "video"}], [{}], [{"type": "text", "text": None}]):
        group = one_group()
        group.played[0].steps[0].prev_obs = shown
        with pytest.raises(EntryError, match="prev_obs of step 0"):
            send(group)
