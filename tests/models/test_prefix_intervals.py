"""Who may look at whom in a row of trees, as intervals: the mask of FlexAttention equals that of
the paths, and its attention that of sdpa."""

import logging
import re

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from training_samples import branching_items, cpu_config, tiny_model
from tree_rows import make_row

from ludic.models.packed_attention import PACKED, get_attention, set_attention
from ludic.models.prefix_trees import BLOCK, PREFIX_FLEX, PREFIX_TREES, PrefixIntervals, find_ends
from ludic.training.algorithm import forward_logits
from ludic.training.batching.mini_batches import MacroBatch
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.preflight import layouts

WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
SAMPLES = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=24), min_size=1, max_size=8)


def test_the_example_of_the_docstring():
    """2 is seen by all behind it; 3 and 4, at places 2 and 3, end where [5] begins, at place 4."""
    assert find_ends(np.array([4, 3]), np.array([0, 2])).tolist() == [5, 5, 4, 4, 5]


@given(samples=SAMPLES, least=st.integers(0, 9), window=st.sampled_from([None, 1, 3, 200]))
def test_the_mask_is_that_of_the_paths(samples, least, window):
    lengths, shared, paths, positions = make_row([40 * sample for sample in samples], least)
    size = len(positions)
    seen = np.zeros((size, size), dtype=bool)
    for path in paths:
        at = np.arange(len(path))
        behind = at[:, None] - at
        seen[np.ix_(path, path)] |= (behind >= 0) & (behind < (window or len(path)))
    mask = PrefixIntervals(find_ends(lengths, shared), positions, "cpu").mask(window)
    place = torch.arange(mask.shape[-1])
    dense = mask.mask_mod(None, None, place[:, None], place[None])
    assert np.array_equal(dense[:size, :size].numpy(), seen)
    # Padding sees itself: for a query without a key some kernels return nan.
    assert torch.equal(dense[size:], torch.eye(len(place), dtype=torch.bool)[size:])
    assert not dense[:size, size:].any()
    blocks = dense.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    assert_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, blocks.all(3).all(1))
    some = blocks.any(3).any(1) & ~blocks.all(3).all(1)
    assert_blocks(mask.kv_num_blocks, mask.kv_indices, some, more=window is not None)


def assert_blocks(counts, indices, expected, *, more=False):
    """`more`: blocks in which nothing is seen may be listed too."""
    for row, (count, order) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)):
        listed, wanted = set(order[:count]), set(expected[row].nonzero()[:, 0].tolist())
        assert wanted <= listed if more else wanted == listed


def tree_batch(seed):
    cfg = cpu_config(prefix_sharing="tree", micro_token_budget=1000)
    [batch] = TreeMiniBatch(MacroBatch.ingest(branching_items((5, 4, 3), seed), 32), np.arange(12), cfg)
    assert PREFIX_TREES in batch.tensors
    return batch.tensors


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("changes", [{}, WINDOWS])
def test_flex_attention_has_the_logits_of_sdpa(changes):
    """On a CPU torch computes it without a gradient; `gpu/test_gradients` has the gradient."""
    model = tiny_model(**changes)
    for seed in range(3):
        with torch.no_grad():
            set_attention(model, PACKED)
            want = forward_logits(model, tree_batch(seed))
            set_attention(model, PREFIX_FLEX)
            torch.testing.assert_close(forward_logits(model, tree_batch(seed)), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("option", [{"dropout": 0.1}, {"position_bias": torch.zeros(1)}, {"s_aux": torch.zeros(1)}])
def test_options_that_would_be_ignored_are_refused(option):
    query = torch.zeros(1, 2, 3, 16)
    [name] = option
    with pytest.raises(ValueError, match=f"supports no {name}"):
        PrefixIntervals(np.array([3, 3, 3]), np.arange(3), "cpu").attend(query, query, query, **option)


def test_rows_of_all_lengths_share_two_compiled_graphs():
    """One is for the first length, one for all others; torch gives up after eight."""
    from torch._dynamo.testing import CompileCounter
    from torch.nn.attention.flex_attention import flex_attention

    compiled = CompileCounter()
    attend = torch.compile(flex_attention, dynamic=True, backend=compiled)
    for size in (100, 300, 700, 128, 256, 1000, 1200, 50):
        cut = size // 2
        lengths, shared = np.array([size - 10, cut + 10]), np.array([0, cut])
        row = PrefixIntervals(find_ends(lengths, shared), np.arange(size), "cpu")
        with torch.no_grad():
            query = torch.zeros(1, 2, row.mask().shape[-1], 16)
            attend(query, query, query, block_mask=row.mask())
    assert compiled.frame_count <= 2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_on_a_gpu_flex_attention_is_taken_and_sdpa_where_it_fails(monkeypatch, caplog):
    def choose(model):
        cfg = cpu_config(prefix_sharing="tree")
        monkeypatch.setattr(layouts, "_is_on_gpu", lambda cfg: True)
        with caplog.at_level(logging.INFO, layouts.__name__):
            assert layouts._prepare_for_trees(model, cfg) is None
        return get_attention(model)

    assert choose(tiny_model()) == PREFIX_FLEX
    assert not caplog.records
    state = torch.get_rng_state()
    dropping = tiny_model(attention_dropout=0.1).eval()
    torch.set_rng_state(state)
    assert choose(dropping) == PACKED
    assert "FlexAttention over prefix trees supports no dropout" in caplog.records.pop().getMessage()
    assert not dropping.training
    assert torch.equal(torch.get_rng_state(), state)
    failing = tiny_model()
    monkeypatch.setattr(PrefixIntervals, "attend", lambda *args, **options: 1 / 0)
    assert choose(failing) == PACKED
    [record] = caplog.records
    assert re.search("sdpa, not by FlexAttention: Qwen2ForCausalLM .*ZeroDivisionError: division", record.getMessage())
