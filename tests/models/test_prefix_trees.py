"""The attention of a row of trees by sdpa: each token attends to its path alone, and few keys and
values are copied."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from training_samples import assert_same_tensors
from tree_rows import make_row

from ludic.models.prefix_trees import Branches

SAMPLES = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=12), min_size=1, max_size=12)
STRETCHES = st.sampled_from([1, 7, 40])
WINDOWS = st.sampled_from([None, 1, 3, 200])


def sdpa(query, key, value, mask):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None).transpose(1, 2)


def branches_of(samples, stretch=1, least=0):
    """The attention, and the place of each token of each sample. Each token is repeated `stretch`
    times."""
    lengths, shared, paths, _ = make_row([[token for token in sample for _ in range(stretch)] for sample in samples], least)
    return Branches.of_samples(lengths, shared, np.concatenate(paths), "cpu"), paths


@given(samples=SAMPLES, stretch=STRETCHES, least=st.integers(0, 9), window=WINDOWS, seed=st.integers(0, 99))
def test_values_and_gradients_are_those_of_each_path_alone(samples, stretch, least, window, seed):
    branches, paths = branches_of(samples, stretch, least)
    size = 1 + max(path[-1] for path in paths)
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(1, 2, size, 4, generator=draw, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    got = branches.attend(sdpa, *tensors, window, torch.float64)
    want = attend_alone(tensors, paths, window)
    torch.testing.assert_close(got, want)
    gradient = torch.randn(got.shape, generator=draw, dtype=torch.float64)
    grads = [torch.autograd.grad(out, tensors, gradient) for out in (got, want)]
    assert_same_tensors(*(dict(enumerate(each)) for each in grads), atol=1e-9)


def attend_alone(tensors, paths, window):
    """[1, U, H, D]: each token as in the first sample that has it, which is a row of its own."""
    out, size = None, 0
    for path in paths:
        behind = torch.arange(len(path))[:, None] - torch.arange(len(path))
        mask = (behind >= 0) & (behind < (window or len(path)))
        own = [at for at, place in enumerate(path) if place >= size]
        part = sdpa(*(tensor[:, :, path] for tensor in tensors), mask)[:, own]
        out, size = part if out is None else torch.cat([out, part], 1), size + len(own)
    return out


@given(samples=SAMPLES, stretch=STRETCHES, window=WINDOWS)
def test_each_query_sees_a_key_also_in_the_padding(samples, stretch, window):
    """With none, some kernels return nan, and its gradient reaches the keys."""
    for mask in branches_of(samples, stretch)[0].masks(window, torch.float32):
        assert mask is None or (mask == 0).any(-1).all()


def count_keys(branches):
    return sum(group.keys.numel() for group in branches.groups)


@given(samples=SAMPLES, stretch=STRETCHES, least=st.integers(0, 9))
def test_a_row_copies_at_most_eight_keys_for_each_of_its_tokens(samples, stretch, least):
    branches, paths = branches_of(samples, stretch, least)
    tokens = 1 + max(path[-1] for path in paths)
    trees = len({path[0] for path in paths})
    assert sum(int((group.keys < tokens).sum()) for group in branches.groups) <= 6 * tokens
    assert count_keys(branches) <= 8 * tokens + 16 * trees


@pytest.mark.parametrize("answers", [128, 1024])
def test_many_short_answers_do_not_copy_a_long_prompt_for_each(answers):
    """1,500 tokens, and 8 of each answer. The prompt is copied once for at least 375 of them, so of
    128 answers (1,024 tokens) three times, not 128 times: 1,500 + 3 * 1,500 + 1,016 keys."""
    lengths, shared = np.full(answers, 1508), np.full(answers, 1500)
    shared[0] = 0
    own = [np.arange(1500 + 8 * at, 1508 + 8 * at) for at in range(answers)]
    places = np.concatenate([part for tail in own for part in (np.arange(1500), tail)])
    branches = Branches.of_samples(lengths, shared, places, "cpu")
    spans = -(-8 * (answers - 1) // 376)
    assert sum(int((group.keys < 1500 + 8 * answers).sum()) for group in branches.groups) == 1508 + 1500 * spans + 8 * (
        answers - 1
    )
    assert count_keys(branches) < 5 * (1500 + 8 * answers)


def test_the_example_of_the_docstring():
    """The query 5 at place 4 sees 1 2 and itself, with a window of 2 tokens 2 and itself."""
    branches = Branches.of_samples(np.array([4, 3]), np.array([0, 2]), np.array([0, 1, 2, 3, 0, 1, 4]), "cpu")
    first, second = branches.groups
    assert (first.keys.tolist(), second.queries.tolist(), second.keys.tolist()) == ([[0, 1, 2, 3]], [[4]], [[0, 1, 4]])
    assert branches.masks(None, torch.float32)[0] is None
    assert branches.masks(None, torch.float32)[1].tolist() == [[[[0, 0, 0]]]]
    assert branches.masks(2, torch.float32)[1].tolist() == [[[[-torch.inf, 0, 0]]]]
