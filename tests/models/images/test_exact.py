"""Log-probabilities of samples with images are the same as by transformers' own path, in every
layout that a model computes exactly."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from image_samples import LAYOUTS, make_batch, read_alone, read_together, seven_samples
from tiny_vision import BLOCKS, EXACT, PADDED, make_tiny_vision
from tree_rows import make_row

from ludic.errors import ConfigError
from ludic.models.images.rows import IMAGES, count_ahead, find_positions, has_image_positions, note_image_blocks
from ludic.models.prefix_trees import PREFIX_FLEX, Branches, PrefixIntervals, find_ends
from ludic.training.algorithm import forward_logits

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # GLM-4V's processor
NAMES = (*EXACT, *BLOCKS)


def difference(left, right):
    return max(float((one - other).abs().max()) for one, other in zip(left, right, strict=True))


def make_samples(name):
    """(model, the seven samples, the log-probabilities of transformers)."""
    model, processor = make_tiny_vision(name)
    samples = seven_samples(processor, pairs=name != "llava_onevision")  # which makes other tiles of several images
    return model, samples, [read_alone(model, sample) for sample in samples]


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_gives_the_log_probabilities_of_transformers(name):
    model, samples, alone = make_samples(name)
    for layout in LAYOUTS:
        assert difference(read_together(model, samples, layout), alone) <= 1e-5, layout
    assert float((alone[0] - alone[3]).abs().max()) >= 0.1  # another image of the same size


@pytest.mark.parametrize("name", PADDED)
def test_padded_rows_give_the_log_probabilities_of_transformers(name):
    model, samples, alone = make_samples(name)
    assert difference(read_together(model, samples, "padded"), alone) <= 1e-5
    assert float((alone[0] - alone[3]).abs().max()) >= 0.1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_flex_attention_gives_the_log_probabilities_of_transformers(name):
    model, samples, alone = make_samples(name)
    assert difference(read_together(model, samples, "trees", attention=PREFIX_FLEX), alone) <= 1e-5


def test_trees_read_an_image_once_and_images_of_one_size_apart():
    _, processor = make_tiny_vision("qwen2_vl")
    samples = seven_samples(processor)
    batch = make_batch(processor, samples, "trees")
    assert len(batch[IMAGES].occurrences) == 4
    assert sum(len(sample.spans) for sample in samples) == 8


def test_without_its_blocks_a_row_is_wrong():
    """So the test above can fail."""
    model, samples, alone = make_samples("gemma3")
    note_image_blocks(model, None)
    for layout in ("padding_free", "trees"):
        assert difference(read_together(model, samples, layout), alone) >= 0.1


def test_positions_of_text_are_places_and_an_image_takes_the_length_of_its_longer_side():
    model, processor = make_tiny_vision("qwen2_vl")
    assert has_image_positions(model)
    assert find_positions(model, torch.arange(5), ()).tolist() == [[0, 1, 2, 3, 4]] * 3
    sample = seven_samples(processor)[0]  # 4 x 4 placeholders
    [span], positions = sample.spans, find_positions(model, torch.tensor(sample.ids), sample.spans)
    start, stop = span.start, span.start + span.length
    assert positions[0, start:stop].tolist() == [start] * 16
    assert positions[1, start:stop].tolist() == [start + row for row in range(4) for _ in range(4)]
    assert positions[2, start:stop].tolist() == [start + column for _ in range(4) for column in range(4)]
    assert positions[:, stop].tolist() == [start + 4] * 3


def test_a_batch_without_features_is_refused_and_one_of_text_has_no_keywords():
    model, processor = make_tiny_vision("llava")
    samples = seven_samples(processor)
    batch = make_batch(processor, samples, "padded")
    with pytest.raises(ConfigError, match="bind"):
        forward_logits(model, batch)
    text = make_batch(processor, samples[-1:], "padded")
    assert text[IMAGES].keywords(model, text) == {}


IMAGE, PIECES = 3, {1: [1], 2: [2], 3: [4, 3, 3, 3, 5]}
"""A token, or an image of three placeholders between its marks."""


@given(
    drawn=st.lists(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=12), min_size=1, max_size=6),
    stretch=st.sampled_from([1, 9]),
    window=st.sampled_from([None, 1, 2, 5, 200]),
)
def test_the_tokens_of_an_image_see_each_other_and_a_window_hides_only_what_is_behind(drawn, stretch, window):
    samples = [[token for piece in stretch * sample for token in PIECES[piece]] for sample in drawn]
    lengths, shared, paths, positions = make_row(samples)
    size = len(positions)
    seen, ahead = np.zeros((size, size), dtype=bool), np.zeros(size, dtype=np.int64)
    for sample, path in zip(sorted(samples), paths, strict=True):
        is_image, place = np.array(sample) == IMAGE, np.arange(len(sample))
        number = np.cumsum(~is_image)  # the same within an image
        together = (number[:, None] == number) & is_image[:, None] & is_image
        back = place[:, None] - place
        seen[np.ix_(path, path)] |= ((back >= 0) | together) & (back < (window or size))
        ahead[path] = count_ahead(torch.from_numpy(is_image)).numpy()
    row, places = torch.from_numpy(ahead), np.concatenate([np.array(path) for path in paths])
    dense = np.zeros((size, size + 1), dtype=bool)
    branches = Branches.of_samples(lengths, shared, places, "cpu")
    for group in branches.groups:
        mask = group.find_seen(branches._ends, branches._positions, window, row)
        for queries, keys, each in zip(group.queries.numpy(), group.keys.numpy(), mask[:, 0].numpy(), strict=True):
            dense[queries[:, None], keys] |= each
    assert np.array_equal(dense[:, :size], seen)
    flex = PrefixIntervals(find_ends(lengths, shared), positions, "cpu").mask(window, row)
    place = torch.arange(flex.shape[-1])
    assert np.array_equal(flex.mask_mod(None, None, place[:, None], place[None])[:size, :size].numpy(), seen)
    listed = torch.zeros(len(place) // 128, len(place) // 128, dtype=torch.bool)
    for counts, indices in ((flex.kv_num_blocks, flex.kv_indices), (flex.full_kv_num_blocks, flex.full_kv_indices)):
        for query, count in enumerate(counts[0, 0].tolist()):
            listed[query, indices[0, 0, query, :count].tolist()] = True
    blocks = np.zeros((len(place), len(place)), dtype=bool)
    blocks[:size, :size] = seen
    assert not (torch.from_numpy(blocks).unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).any(3).any(1) & ~listed).any()
