"""Samples with images in batches: ids are equal only where images are, micro-batches have the
placeholders and images of their samples, and no image is divided."""

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from training_samples import cpu_config

from ludic import _core
from ludic.errors import DataError
from ludic.models.images.rows import IMAGES, KEY
from ludic.models.prefix_trees import PREFIX_TREES
from ludic.training import ActorTokenLogps, SampleAttachments, SAWItem, collate_saw_items
from ludic.training.batching import tree_batches
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.packing import collate_micro_batches, truncate_item, without_trees
from ludic.training.batching.pair_batches import PreferenceMacroBatch
from ludic.training.batching.rank_plans import RankShare
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.dpo_trainer import mismatch_answers
from ludic.training.info_seed.seed_tags import with_prompt
from ludic.training.reference import item_key, sample_keys
from ludic.types import ImageSpan

PLACEHOLDER, MARK = 30, 31
IMAGE = {"a": [30, 30, 30], "b": [30, 30, 30], "c": [30, 31, 30, 30]}
"""Ids of the images: `a` and `b` are of equal size, `c` has a mark between its rows."""
LAYOUTS = ("optimal", "padding_free", "trees")


@pytest.fixture(autouse=True)
def every_common_token_is_shared(monkeypatch):
    monkeypatch.setattr(tree_batches, "MIN_SHARED", 1)


def make_item(parts, answer, *, number=0, step=0):
    """A sample whose prompt has `parts`, names of images or tokens."""
    ids, spans = [], []
    for part in parts:
        if part in IMAGE:
            spans.append(ImageSpan(part, len(ids), len(IMAGE[part])))
        ids += IMAGE.get(part, [part])
    mask = [0] * len(ids) + [1] * len(answer)
    logps = SampleAttachments(ActorTokenLogps([-1.0 - place for place in range(len(answer))]))
    meta = {"rollout_id": f"r{number}", "step_index": step}
    return SAWItem([*ids, *answer], [1] * len(mask), mask, 1.0 + number, meta, logps, tuple(spans))


tokens = st.integers(1, 3)
prompts = st.tuples(st.integers(6, 9), st.lists(st.one_of(tokens, st.sampled_from("abc")), max_size=5)).map(
    lambda parts: [parts[0], *parts[1]]
)


@st.composite
def samples(draw, *, episodes=True):
    """Answers to few prompts, and episodes whose turns bring images."""
    items = []
    for parts in draw(st.lists(prompts, min_size=1, max_size=3)):
        for answer in draw(st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=3)):
            items.append(make_item(parts, answer, number=len(items)))
            if episodes and draw(st.booleans()):
                more = draw(st.lists(st.one_of(tokens, st.sampled_from("abc")), min_size=1, max_size=3))
                items.append(make_item([*parts, *answer, *more], [1, 2], number=len(items), step=1))
    return [*items, make_item([7, "a", 5], [4, 5], number=len(items)), make_item([7, "b", 5], [4, 5], number=len(items) + 1)]


def mini_batch(items, layout, *, budget=100, merge_turns=False, share=None):
    cfg = cpu_config(
        max_seq_len=40,
        micro_token_budget=budget,
        packing="optimal" if layout == "trees" else layout,
        prefix_sharing="tree" if layout == "trees" else "off",
    )
    macro = replace(MacroBatch.ingest(items, 64, merge_turns=merge_turns), share=share)
    return (TreeMiniBatch if layout == "trees" else MiniBatch)(macro, np.arange(len(macro.items)), cfg)


def content_of(item):
    """[T] what each token is: its id, and the image of a placeholder."""
    content = [(token, None) for token in item.input_ids]
    for digest, start, length in item.images:
        content[start : start + length] = [(token, digest if token == PLACEHOLDER else None) for token in IMAGE[digest]]
    return content


def content_of_row(ids, spans):
    """The same of a sequence with its spans."""
    return content_of(SAWItem(ids, [], [], 0.0, images=tuple(spans)))


def sequences_of(tensors):
    """The ids of the sequences of a micro-batch."""
    if "cu_seqlens" in tensors:
        return [part.tolist() for part in tensors["input_ids"][0].split(tensors["cu_seqlens"].diff().tolist())]
    return [row[mask != 0].tolist() for row, mask in zip(tensors["input_ids"], tensors["attention_mask"], strict=True)]


@given(items=samples())
def test_ids_of_the_table_are_equal_only_where_images_are(items):
    macro = MacroBatch.ingest(items, 64)
    keyed = macro.table.collate_padding_free(np.arange(len(items)))["input_ids"][0].tolist()
    contents = [each for item in macro.items for each in content_of(item)]
    of_key, of_content = {}, {}
    for key, content in zip(keyed, contents, strict=True):
        assert of_key.setdefault(key, content) == content
        assert of_content.setdefault(content, key) == key
        assert (key >= KEY) == (content[1] is not None)
    numbers = {digest: number for number, digest in enumerate(macro.images.digests)}
    assert all(key == KEY + numbers[digest] for key, (_, digest) in zip(keyed, contents, strict=True) if digest)
    again = _core.SampleTable.from_bytes(macro.table.to_bytes()).collate_padding_free(np.arange(len(items)))
    assert again["input_ids"][0].tolist() == keyed


@pytest.mark.parametrize("layout", LAYOUTS)
@given(items=samples(), budget=st.integers(40, 120))
def test_micro_batches_have_the_ids_and_images_of_their_samples(layout, items, budget):
    whole = mini_batch(items, layout, budget=budget)
    seen = []
    for index, batch in enumerate(whole):
        rows = whole.micro_batch_rows(index)
        own = [whole.batch.items[row] for row in rows]
        tensors = without_trees(batch.tensors)
        assert (PREFIX_TREES in batch.tensors) == (layout == "trees")
        assert sequences_of(tensors) == [item.input_ids for item in own]
        assert list(tensors[IMAGES].spans) == [item.images for item in own]
        for part, item in zip(batch.parts(), own, strict=True):
            assert sequences_of(part.tensors) == [item.input_ids]
            assert list(part.tensors[IMAGES].spans) == [item.images]
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(items)))


def test_the_images_of_trees_are_those_of_their_samples_in_any_order():
    """Pairs come chosen before rejected, and lines the costliest first, whatever the trees."""
    items = [
        make_item([first, name, 5], [4] * size, number=size) for first, name, size in ((6, "a", 9), (8, "b", 1), (7, "c", 3))
    ]
    [batch] = mini_batch([*items, *(replace(item, input_ids=[*item.input_ids[:-1], 3]) for item in items)], "trees")
    assert batch.tensors[IMAGES].order != sorted(batch.tensors[IMAGES].order)
    for part, name in zip(batch.parts(), batch.sample_names, strict=True):
        item = next(item for item in items if name == f"{item.meta['rollout_id']}/0")
        assert list(part.tensors[IMAGES].spans) == [item.images]


@given(items=samples(), budget=st.integers(40, 120))
def test_a_tree_computes_each_image_that_its_samples_share_once(items, budget):
    for batch in mini_batch(items, "trees", budget=budget):
        trees, images = batch.tensors[PREFIX_TREES], batch.tensors[IMAGES]
        contents = {}
        sequences = zip(sequences_of(without_trees(batch.tensors)), images.select(slice(None)).spans, strict=True)
        places = iter(trees.places.tolist())
        for ids, spans in sequences:
            for content in content_of_row(ids, spans):
                place = next(places)
                assert contents.setdefault(place, content) == content
        row = [contents[place] for place in range(trees.input_ids.numel())]
        assert trees.input_ids[0].tolist() == [token for token, _ in row]
        expected = [digest for digest in images.occurrences for token in IMAGE[digest] if token == PLACEHOLDER]
        assert [digest for _, digest in row if digest] == expected


@pytest.mark.parametrize("layout", ["optimal", "padding_free"])
@given(items=samples())
def test_a_row_of_merged_turns_has_the_images_of_its_last_turn(layout, items):
    for batch in mini_batch(items, layout, merge_turns=True):
        tensors = batch.tensors
        ids, spans = sequences_of(tensors), list(tensors[IMAGES].spans)
        turns = tensors["turns"].tolist() if "turns" in tensors else [[row, 0, len(row_ids)] for row, row_ids in enumerate(ids)]
        names = {f"{item.meta['rollout_id']}/{item.meta['step_index']}": item for item in items}
        for name, (row, _, end) in zip(batch.sample_names, turns, strict=True):
            assert content_of_row(ids[row], spans[row])[:end] == content_of(names[name])
        assert all(
            list(part.tensors[IMAGES].spans) == [spans[row]] for part, (row, _, _) in zip(batch.parts(), turns, strict=True)
        )


def test_turns_that_bring_images_share_a_row():
    first = make_item([7, "a", 5], [4])
    second, other = (make_item([7, name, 5, 4, "c", 6], [4, 4], step=1) for name in "ab")
    assert [batch.tensors["input_ids"].shape[0] for batch in mini_batch([first, second], "optimal", merge_turns=True)] == [1]
    assert "turns" not in next(iter(mini_batch([first, other], "optimal", merge_turns=True))).tensors


@given(items=samples())
def test_the_digest_of_a_batch_knows_its_images(items):
    assert MacroBatch.ingest(items, 64).digest() == MacroBatch.ingest(items, 64).digest()
    other = {"a": "b", "b": "a", "c": "c"}
    swapped = [
        replace(item, images=tuple(span._replace(digest=other[span.digest]) for span in item.images)) if row == 0 else item
        for row, item in enumerate(items)
    ]
    changed = any(span.digest != "c" for span in items[0].images)
    assert (MacroBatch.ingest(items, 64).digest() != MacroBatch.ingest(swapped, 64).digest()) == changed
    renamed = [replace(item, images=tuple(span._replace(digest=span.digest * 2) for span in item.images)) for item in items]
    assert MacroBatch.ingest(items, 64).digest() != MacroBatch.ingest(renamed, 64).digest()


@given(items=samples())
def test_truncation_leaves_no_part_of_an_image(items):
    for limit in range(1, max(len(item.input_ids) for item in items) + 1):
        batch = MacroBatch.ingest(items, limit)
        kept = {item.meta["rollout_id"]: item for item in [*batch.items, *batch.dropped]}
        for item in items:
            cut = kept[item.meta["rollout_id"]]
            length = len(cut.input_ids)
            assert content_of(cut) == content_of(item)[:length]
            assert cut.input_ids.count(PLACEHOLDER) == sum(IMAGE[span.digest].count(PLACEHOLDER) for span in cut.images)
            divided = [span for span in item.images if span.start < limit < span.start + span.length]
            assert length == (divided[0].start if divided else min(limit, len(item.input_ids)))
            assert cut.meta["seq_len_truncated"] == (length < len(item.input_ids))
        assert batch.truncated_empty == len(batch.dropped)
        assert batch.table.lengths.tolist() == [len(item.input_ids) for item in batch.items]


def test_what_follows_a_cut_image_is_cut_too():
    item = make_item([7, "a", 5], [4, 4, 4])
    cut = truncate_item(item, 3)
    assert (cut.input_ids, cut.images, cut.meta["seq_len_retained"]) == ([7], (), 1)
    assert MacroBatch.ingest([item], 3).truncated_empty == 1
    assert MacroBatch.ingest([item], 6).truncated_empty == 0


def test_a_batch_of_text_has_no_images():
    items = [replace(make_item([7, 5], [4, 4], number=row)) for row in range(2)]
    batch = MacroBatch.ingest(items, 64)
    assert batch.images is None
    for layout in LAYOUTS:
        assert all(IMAGES not in each.tensors for each in mini_batch(items, layout))
    assert IMAGES not in collate_saw_items(items, pad_token_id=0, device="cpu")


@given(items=samples())
def test_collations_without_a_plan_have_images_too(items):
    tensors = collate_saw_items(items, pad_token_id=0, device="cpu")
    assert sequences_of(tensors) == [item.input_ids for item in items]
    assert list(tensors[IMAGES].spans) == [item.images for item in items]
    limit = max(len(item.input_ids) for item in items) - 1
    batches = collate_micro_batches(items, pad_token_id=0, device="cpu", micro_token_budget=64, max_seq_len=limit)
    found = [
        content for each in batches for content in map(content_of_row, sequences_of(each.tensors), each.tensors[IMAGES].spans)
    ]
    assert sorted(map(str, found)) == sorted(str(content_of(truncate_item(item, limit))) for item in items)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(items=samples(), merge_turns=st.booleans())
def test_a_sample_has_one_key_in_every_layout(layout, items, merge_turns):
    """What a reference computed for it is found again, and another image is another sample."""
    whole = mini_batch(items, layout, merge_turns=merge_turns and layout != "trees")
    names = {f"{item.meta['rollout_id']}/{item.meta['step_index']}": item for item in items}
    for batch in whole:
        assert sample_keys(batch) == [item_key(names[name]) for name in batch.sample_names]
    assert len({item_key(item) for item in items}) == len({(str(content_of(item)), str(item.action_mask)) for item in items})


def test_the_saved_position_of_a_source_belongs_to_its_images():
    one, other = (ItemBatchSource([make_item([7, name, 5], [4])], batch_size=1) for name in "ab")
    assert one.state_dict()["digest"] != other.state_dict()["digest"]


@pytest.mark.parametrize("images", ["ab", "aa"])
def test_a_pair_that_differs_by_its_image_alone_is_no_equal_pair(images):
    pair = [make_item([7, name, 5], [4, 4]) for name in images]
    for item, role in zip(pair, ("chosen", "rejected"), strict=True):
        item.meta |= {"pair_id": "p", "role": role, "label": 1.0}
        item.attachments = SampleAttachments()
    for limit, dropped in ((64, 0), (6, int(images == "aa"))):
        batch = PreferenceMacroBatch.ingest_pairs(pair, limit)
        assert batch.counts_by_reason["pairs_truncated_equal"] == dropped
    whole = PreferenceMacroBatch.ingest_pairs(pair, 64)
    assert whole.counts_by_reason["pairs_identical"] == int(images == "aa")
    assert whole.images.spans == [item.images for item in pair]


def test_an_answer_to_another_prompt_has_the_images_of_that_prompt():
    items = [
        make_item([7, name, 5], answer, number=row)
        for row, (name, answer) in enumerate(zip("abc", ([1], [2, 2], [3]), strict=True))
    ]
    for row, item in enumerate(items):
        item.meta |= {"pair_id": row, "role": "chosen", "label": 1.0}
    for limit in range(3, 10):
        for row, made in enumerate(mismatch_answers(MacroBatch.ingest(items, 64), limit).values()):
            other = items[row - 1]
            whole = content_of(items[row])[: len(IMAGE["abc"[row]]) + 2] + [
                (token, None) for token in other.input_ids[-sum(other.action_mask) :]
            ]
            assert content_of(made) == whole[-len(made.input_ids) :]
            assert len(made.input_ids) == len(made.action_mask) <= limit
            assert made.input_ids.count(PLACEHOLDER) == sum(IMAGE[span.digest].count(PLACEHOLDER) for span in made.images)


def test_another_prompt_moves_the_images_behind_it():
    item = make_item([7, "a", 5], [4])
    turn = replace(
        item, input_ids=[*item.input_ids, 8, 30, 30, 30, 9], attention_mask=[1] * 11, action_mask=[0] * 5 + [1, 0, 0, 0, 0, 1]
    )
    turn.images = (*item.images, ImageSpan("b", 7, 3))
    moved = with_prompt(turn, [1, 30, 31, 30, 30, 2, 3], [ImageSpan("c", 1, 4)])
    assert moved.images == (ImageSpan("c", 1, 4), ImageSpan("b", 9, 3))
    assert moved.input_ids == [1, 30, 31, 30, 30, 2, 3, 4, 8, 30, 30, 30, 9]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_micro_batch_without_weight_has_the_images_of_its_row(layout):
    items = [replace(make_item([7, "a", 5], [4, 5], number=row), weight=0.0) for row in range(2)]
    whole = mini_batch(items, layout)
    skipping = type(whole)(whole.batch, np.arange(2), whole.cfg, skip_zero_weight=True)
    [batch] = skipping
    assert (batch.num_items, batch.tensors[IMAGES].occurrences) == (0, ["a"])
    assert not batch.tensors["action_mask"].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@given(items=samples())
def test_each_rank_has_the_images_of_its_rows(layout, items):
    found = []
    for rank in range(2):
        whole = mini_batch(items, layout, share=RankShare(rank, 2))
        for index, batch in enumerate(whole):
            rows = whole.micro_batch_rows(index)
            tensors = without_trees(batch.tensors)
            own = [items[row] for row in rows] if len(rows) else [items[int(whole.stand_in[0])]]
            assert list(map(content_of_row, sequences_of(tensors), tensors[IMAGES].spans)) == [content_of(item) for item in own]
            found += rows.tolist()
    assert sorted(found) == list(range(len(items)))


def test_wrong_spans_are_refused_with_their_place():
    item = make_item([7, "a", 5], [4])
    with pytest.raises(DataError, match=r"images has .* of 6 tokens"):
        MacroBatch.ingest([replace(item, images=(ImageSpan("a", 4, 5),))], 64)
    with pytest.raises(DataError, match="begins with token 7, of sample 1 with 30"):
        MacroBatch.ingest([replace(item, images=(ImageSpan("a", 0, 3),)), item], 64)


def test_trees_keep_two_images_of_equal_size_apart():
    items = [
        make_item([7, 1, 2, name, 5], [token], number=row)
        for row, (name, token) in enumerate(zip("aabb", (1, 2, 1, 2), strict=True))
    ]
    [batch] = mini_batch(items, "trees")
    assert batch.tensors[PREFIX_TREES].input_ids.numel() == 3 + 2 * (3 + 1 + 2)
    assert sorted(batch.tensors[IMAGES].occurrences) == ["a", "b"]
    runs = [
        len(list(run))
        for is_image, run in groupby(batch.tensors[PREFIX_TREES].input_ids[0].tolist(), lambda token: token == PLACEHOLDER)
        if is_image
    ]
    assert runs == [3, 3]
    assert isinstance(batch.tensors["input_ids"], torch.Tensor)
