"""Samples with images: as bytes, and cut."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from image_spans import draw_picture, span_lists

from ludic.errors import DataError
from ludic.images.store import ImageError, ImageStore, use_store
from ludic.training.batching.packing import collate_micro_batches, truncate_and_flag, truncate_item
from ludic.training.batching.sample_codec import decode_batch, encode_batch
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWBatch, SAWItem
from ludic.types import ImageSpan

STORE = ImageStore()
DIGESTS = [STORE.add(draw_picture(seed)) for seed in range(3)]


@st.composite
def items(draw, max_images=3):
    """Samples whose action tokens are those outside of images, from a drawn place."""
    ids, spans = draw(span_lists(DIGESTS, max_images))
    ids = [*ids, *draw(st.lists(st.integers(0, 250), min_size=1, max_size=4))]
    inside = {place for _, start, length in spans for place in range(start, start + length)}
    begin = draw(st.integers(0, len(ids) - 1))
    mask = [int(place >= begin and place not in inside) for place in range(len(ids))]
    mask[-1] = 1
    logps = ActorTokenLogps([-float(place) for place in range(sum(mask))])
    return SAWItem(ids, [1] * len(ids), mask, 0.5, {"rollout_id": "r"}, SampleAttachments(logps), spans)


@given(samples=st.lists(items(), min_size=1, max_size=4))
def test_a_batch_with_images_comes_back_as_it_was(samples):
    for is_exact in (False, True):
        with use_store(STORE):
            again = decode_batch(*encode_batch(SAWBatch(samples), is_exact=is_exact)).items
        assert [item.images for item in again] == [item.images for item in samples]
        assert [item.input_ids for item in again] == [item.input_ids for item in samples]
        assert all(type(span) is ImageSpan for item in again for span in item.images)


@given(samples=st.lists(items(max_images=0), min_size=1, max_size=3))
def test_a_batch_of_text_takes_one_byte_for_images(samples):
    head, table = encode_batch(SAWBatch(samples))
    assert head[0] == 0x94
    assert b"\x98\xc4" in head  # the samples are eight fields, of which the first is bytes
    assert head.count(b"\x90\x90\x90") == 1  # no candidates, images and routes
    assert decode_batch(head, table).items == samples


def test_a_batch_whose_image_is_gone_is_one_line():
    item = SAWItem([9, 1], [1, 1], [0, 1], 1.0, images=(ImageSpan(DIGESTS[0], 0, 1),))
    parts = encode_batch(SAWBatch([item]))
    with use_store(ImageStore()), pytest.raises(ImageError, match=f"image '{DIGESTS[0]}' is not in"):
        decode_batch(*parts)
    with use_store(STORE):
        assert decode_batch(*parts).items == [item]
    with use_store(STORE), pytest.raises(DataError, match="images has"):
        decode_batch(*encode_batch(SAWBatch([replace(item, images=(ImageSpan(DIGESTS[0], 1, 2),))])))


@settings(max_examples=settings.default.max_examples * 4)
@given(item=items(), max_seq_len=st.integers(1, 25))
def test_a_sample_is_cut_before_an_image_and_never_in_it(item, max_seq_len):
    allowed = [0, *(kept for kept in range(1, max_seq_len + 1) if not in_image(item, kept))]
    longest = min(max(allowed), len(item.input_ids))
    if longest == 0:
        with pytest.raises(DataError, match=rf"first image has \d+ tokens, max_seq_len is {max_seq_len}"):
            truncate_item(item, max_seq_len)
        return
    cut, flagged = truncate_item(item, max_seq_len), truncate_and_flag(item, max_seq_len)
    for each in (cut, flagged):
        assert each.input_ids == item.input_ids[:longest]
        assert each.attention_mask == item.attention_mask[:longest]
        assert each.action_mask == item.action_mask[:longest]
        assert each.images == tuple(span for span in item.images if span.start + span.length <= longest)
        assert each.actor_logps.token_logps == item.actor_logps.token_logps[: sum(each.action_mask)]
    assert (cut is item) == (len(item.input_ids) <= max_seq_len)
    assert flagged.meta["seq_len_truncated"] == (cut is not item)
    if cut is not item:
        assert (cut.meta["seq_len_original"], cut.meta["seq_len_retained"]) == (len(item.input_ids), longest)
    assert truncate_item(cut, max_seq_len) is cut


def in_image(item, place):
    """Whether a cut before the token `place` divides an image."""
    return any(start < place < start + length for _, start, length in item.images)


def test_micro_batches_have_the_tokens_of_the_cut_samples():
    item = SAWItem([5, 6, 9, 9, 9, 7], [1] * 6, [0, 1, 0, 0, 0, 1], 1.0, images=(ImageSpan(DIGESTS[0], 2, 3),))
    [batch] = collate_micro_batches([item], pad_token_id=0, device="cpu", micro_token_budget=8, max_seq_len=4)
    assert batch.tensors["input_ids"].tolist() == [[5, 6]]
    assert truncate_item(item, 4).images == truncate_item(item, 3).images == truncate_item(item, 2).images == ()
