"""Sampling: the random stream of a request, and inverse transform sampling from its
distribution."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ludic.inference import SamplingParams
from ludic.inference.local import sampler as module
from ludic.inference.local.sampler import BLOCK, TILE, Sampler, _invert, nucleus, stream_key

CPU = torch.device("cpu")


def stream(seed, prompt):
    return np.random.Generator(np.random.Philox(key=stream_key(seed, prompt)))


def sampler(params, count, prompt=(1,)):
    return Sampler([params] * count, [stream_key(seed, prompt) for seed in range(count)], CPU)


@given(st.integers(-(2**70), 2**70), st.lists(st.integers(0, 2**40), max_size=5))
def test_the_stream_is_a_function_of_seed_and_prompt(seed, prompt):
    first, second = stream(seed, prompt).random(3), stream(seed, list(prompt)).random(3)
    assert (first == second).all()
    assert (first != stream(seed + 1, prompt).random(3)).all()
    assert (first != stream(seed, [*prompt, 0]).random(3)).all()


def test_without_a_seed_every_stream_is_new():
    assert (stream(None, [1]).random(3) != stream(None, [1]).random(3)).all()


def test_neighbouring_seeds_and_prompts_are_uncorrelated():
    # 64 x 64 streams of 64 uniforms. The mean of 64 products of standardised uniforms has standard
    # deviation 1/8; over the 4032 pairs of neighbours it is 1/8/sqrt(4032) = 0.002 if they are
    # independent. Equal streams would give 1.
    drawn = np.array([[stream(seed, [prompt]).random(64) for seed in range(64)] for prompt in range(64)])
    centred = (drawn - 0.5) * np.sqrt(12)
    assert abs((centred[1:] * centred[:-1]).mean()) < 0.012
    assert abs((centred[:, 1:] * centred[:, :-1]).mean()) < 0.012
    assert (
        abs((centred[1:, :-1] * centred[:-1, 1:]).mean()) < 0.012
    )  # seed + 1 on one prompt, seed on the next prompt: the overlap of groups


def test_the_uniforms_of_a_row_continue_across_blocks_and_follow_the_row():
    whole = stream(5, [1]).random(3 * BLOCK)
    rows = sampler(SamplingParams(temperature=1.0), 8)
    got = []
    for position in range(3 * BLOCK):
        rows.draw(torch.zeros(len(rows.uniforms), 4), position)
        row = {8: 5, 4: 2, 1: 0}[len(rows.uniforms)]
        got.append(rows.uniforms[row, position % BLOCK].item())
        if position == 10:
            rows.keep(torch.tensor([0, 4, 5, 7]))
        if position == BLOCK + 3:
            rows.keep(torch.tensor([2]))
    assert got == whole.tolist()


@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=6), st.floats(0.05, 1.0))
def test_top_p_keeps_the_smallest_set_that_reaches_the_threshold(logits, top_p):
    logits = torch.tensor(logits)
    p = torch.softmax(logits, -1).double()
    ordered = p.sort(descending=True).values
    before = ordered.cumsum(0) - ordered
    if ((before - top_p).abs() < 1e-6).any():
        return  # within rounding error of the threshold
    size = int((before < top_p).sum())
    tokens, _, drawn = sampler(SamplingParams(temperature=1.0, top_p=top_p), 64).draw(logits.repeat(64, 1), 0)
    smallest = ordered[size - 1]
    assert all(p[token] >= smallest - 1e-9 for token in tokens)
    expected = (p / ordered[:size].sum()).log()[tokens]
    if len(set(ordered.tolist())) == len(ordered):  # equal probabilities can be cut in any order
        torch.testing.assert_close(drawn.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.5, 0.75, np.nextafter(1.0, 0.0)])
def test_a_token_of_probability_zero_is_never_sampled(uniform):
    rows = sampler(SamplingParams(temperature=1.0), 1)
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    rows.draw(logits, 0)
    rows.uniforms[:] = uniform
    # Probabilities 0, 1/2, 0, 1/2, 0: below 1/2 it is token 1, from 1/2 on token 3.
    assert rows.draw(logits, 1)[0].item() == (1 if uniform < 0.5 else 3)


def test_the_inverse_distribution_function_is_exact():
    # Probabilities 0.1, 0.2, 0.3, 0.4 have boundaries 0.1, 0.3, 0.6.
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    rows = sampler(SamplingParams(temperature=1.0), 1)
    rows.draw(logits, 0)
    for uniform, token in [(0.0999, 0), (0.1001, 1), (0.2999, 1), (0.3001, 2), (0.5999, 2), (0.6001, 3), (0.9999, 3)]:
        rows.uniforms[:] = uniform
        assert rows.draw(logits, 1)[0].item() == token


def test_temperature_divides_the_logits():
    # Odds 1 : 4 at temperature 1 are 1 : 2 at temperature 2 and 1 : 16 at one half.
    logits = torch.log(torch.tensor([[1.0, 4.0]])).repeat(200, 1)
    for temperature, share in [(2.0, 1 / 3), (0.5, 1 / 17)]:
        tokens, raw, drawn = sampler(SamplingParams(temperature=temperature), 200).draw(logits, 0)
        torch.testing.assert_close(drawn.exp(), torch.where(tokens == 0, share, 1 - share))
        torch.testing.assert_close(raw.exp(), torch.where(tokens == 0, 0.2, 0.8))


def test_presence_and_frequency_penalties_are_subtracted():
    # Greedy over logits 1.0 and 0.0, frequency penalty 0.4: after n draws token 0 has 1 - 0.4 n, so
    # 0, 0, 0, then 1 (-0.2 < 0).
    rows = sampler(SamplingParams(temperature=0.0, frequency_penalty=0.4), 1)
    assert [rows.draw(torch.tensor([[1.0, 0.0]]), i)[0].item() for i in range(4)] == [0, 0, 0, 1]
    # Presence penalties 0.6 and 1.2: after one draw token 0 has logit 0.4 and -0.2, and further
    # draws change nothing.
    rows = sampler(SamplingParams(temperature=0.0, presence_penalty=0.6), 1)
    assert [rows.draw(torch.tensor([[1.0, 0.0]]), i)[0].item() for i in range(4)] == [0, 0, 0, 0]
    rows = sampler(SamplingParams(temperature=0.0, presence_penalty=1.2), 1)
    assert [rows.draw(torch.tensor([[1.0, 0.0]]), i)[0].item() for i in range(3)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("values", "warpers"),
    [
        ({"top_k": 3}, [TopKLogitsWarper(3)]),
        ({"top_k": 100}, []),
        ({"min_p": 0.3}, [MinPLogitsWarper(0.3)]),
        ({"top_k": 5, "top_p": 0.7}, [TopKLogitsWarper(5), TopPLogitsWarper(0.7)]),
        ({"repetition_penalty": 1.7}, [RepetitionPenaltyLogitsProcessor(1.7)]),
    ],
)
def test_the_distribution_is_that_of_transformers(values, warpers):
    """The log-probabilities of drawn tokens, for eight rows beside eight without these settings."""
    logits = torch.randn(16, 20, generator=torch.Generator().manual_seed(0)) * 2
    prompts = [[row, (row + 7) % 20] for row in range(16)]
    shaped, plain = SamplingParams(temperature=0.7, **values), SamplingParams(temperature=0.7)
    rows = Sampler([shaped] * 8 + [plain] * 8, [stream_key(row, [1]) for row in range(16)], CPU, prompts)
    seen = torch.tensor(prompts)
    for step in range(4):
        tokens, raw, drawn = rows.draw(logits, step)
        expected = logits.clone()
        for warp in warpers:
            if isinstance(warp, RepetitionPenaltyLogitsProcessor):
                expected = warp(seen, expected)
        expected = TemperatureLogitsWarper(0.7)(seen, expected)
        for warp in warpers:
            if not isinstance(warp, RepetitionPenaltyLogitsProcessor):
                expected = warp(seen, expected)
        without = len(logits) // 2
        expected[without:] = logits[without:] / 0.7
        at = tokens[:, None]
        torch.testing.assert_close(drawn, expected.log_softmax(-1).gather(1, at).squeeze(1))
        torch.testing.assert_close(raw, logits.log_softmax(-1).gather(1, at).squeeze(1))
        seen = torch.cat([seen, at], dim=1)
        if step == 1:
            kept = torch.arange(0, 16, 2)
            rows.keep(kept)
            logits, seen = logits[kept], seen[kept]
    assert (rows.seen is not None) == ("repetition_penalty" in values)


def test_large_vocabularies_are_processed_in_chunks(monkeypatch):
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.3)
    results = []
    for elements in (1 << 22, 100):  # all rows at once, two rows at once
        monkeypatch.setattr("ludic.inference.local.sampler.CHUNK_ELEMENTS", elements)
        rows = sampler(params, 7)
        results.append([torch.stack([part.double() for part in rows.draw(logits, i)]) for i in range(3)])
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(whole, parts)


@given(
    vocabulary=st.integers(1, 3 * TILE + 5),
    kind=st.sampled_from(["even", "peaked", "mostly zero"]),
    uniforms=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=5),
    seed=st.integers(0, 999),
)
def test_a_token_is_looked_up_as_in_the_cumulative_sum_of_all_tokens(vocabulary, kind, uniforms, seed):
    generator = torch.Generator().manual_seed(seed)
    p = {
        "even": lambda: torch.ones(vocabulary),
        "peaked": lambda: torch.softmax(20 * torch.randn(vocabulary, generator=generator), dim=-1),
        "mostly zero": lambda: (torch.rand(vocabulary, generator=generator) < 0.02).float(),
    }[kind]()
    if not p.any():
        p[vocabulary // 2] = 1.0
    tokens = _invert(p.repeat(len(uniforms), 1), torch.tensor(uniforms, dtype=torch.float64)).tolist()
    cumulative = np.cumsum(p.double().numpy())
    for uniform, token in zip(uniforms, tokens, strict=True):
        target = uniform * cumulative[-1]
        assert p[token] > 0
        # Between its two boundaries, up to the rounding of float32 sums.
        assert cumulative[token] - p[token].item() - 1e-5 * cumulative[-1] <= target <= cumulative[token] + 1e-5 * cumulative[-1]


def slow_nucleus(logits, top_p):
    """The smallest set by a stable sort of the whole row."""
    p = torch.softmax(logits, dim=-1)
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    dropped = torch.zeros_like(p, dtype=torch.bool)
    return logits.masked_fill(dropped.scatter(1, order, ordered.cumsum(-1) - ordered >= top_p[:, None]), -torch.inf)


@given(
    rows=st.lists(st.lists(st.integers(-4, 4), min_size=12, max_size=12), min_size=1, max_size=5),
    top_p=st.lists(st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.99]), min_size=5, max_size=5),
    head=st.integers(1, 14),
)
def test_the_nucleus_is_that_of_a_whole_stable_sort_also_of_equal_probabilities(rows, top_p, head):
    logits, top_p = torch.tensor(rows).float(), torch.tensor(top_p[: len(rows)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "HEAD", head)
        assert torch.equal(nucleus(logits, top_p), slow_nucleus(logits, top_p))


def test_of_equal_probabilities_the_first_are_kept():
    # Four tokens of 1/4, top-p 0.5: those before token 2 have 1/2, which is not below 0.5.
    kept = nucleus(torch.zeros(1, 4), torch.tensor([0.5]))
    assert kept.tolist() == [[0.0, 0.0, -torch.inf, -torch.inf]]


def test_a_row_with_nan_does_not_change_the_others():
    kept = nucleus(torch.tensor([[3.0, 1.0, 0.0], [torch.nan, 1.0, 0.0]]), torch.tensor([0.5, 0.5]))
    assert kept[0].tolist() == [3.0, -torch.inf, -torch.inf]
    assert kept[1].isnan().any()


def test_rows_without_top_p_are_unchanged_beside_rows_with_it():
    logits = torch.tensor([[3.0, 1.0, -torch.inf], [3.0, 1.0, 0.0]])
    assert nucleus(logits, torch.tensor([1.0, 0.5])).tolist() == [[3.0, 1.0, -torch.inf], [3.0, -torch.inf, -torch.inf]]


def test_an_unlikely_token_has_its_log_probability_though_its_probability_is_below_float32():
    # At temperature 200 both tokens are about as likely, at temperature 1 the second has e^-200.
    rows = sampler(SamplingParams(temperature=200.0), 64)
    tokens, raw, _ = rows.draw(torch.tensor([[0.0, -200.0]]).repeat(64, 1), 0)
    assert tokens.unique().tolist() == [0, 1]
    torch.testing.assert_close(raw, torch.where(tokens == 1, -200.0, 0.0))
