"""Log-probabilities and entropy from hidden states are those from the logits, with their
gradients."""

import math

import pytest
import torch
from benches.python.token_scores import measure, with_logits, without_logits
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from ludic.models.output_layer import OutputLayer, Products
from ludic.training.loss import token_scores
from ludic.training.loss.logprobs import compute_token_entropy, compute_token_logp
from ludic.training.loss.token_scores import TokenScores, compute_scores

N, D, V = 7, 5, 41


def scores_from_logits(layer, products, index, temperature):
    """The definition, written down."""
    sums = sum(inputs @ weights.T for inputs, weights in zip(products.inputs, products.weights, strict=True))
    logits = layer.transform(sums if products.bias is None else sums + products.bias)
    logp = torch.log_softmax(logits / temperature, dim=-1)
    return logp.gather(1, index[:, None]).squeeze(1), -(logp.exp() * logp).sum(dim=1)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    columns=st.integers(1, V + 1),
    cap=st.sampled_from([None, 2.0, 30.0]),
    scale=st.sampled_from([1.0, 0.25, 3.0]),
    temperature=st.sampled_from([1.0, 0.6]),
    bias=st.booleans(),
    adapter=st.booleans(),
    with_entropy=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_scores_and_gradients_equal_those_of_the_logits(
    monkeypatch, seed, columns, cap, scale, temperature, bias, adapter, with_entropy, dtype
):
    monkeypatch.setattr(token_scores, "LEAST_COLUMNS", columns)
    monkeypatch.setattr(token_scores, "TILE_ELEMENTS", 1)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    widths = (D, 2) if adapter else (D,)
    products = Products(
        tuple(draw(N, width) for width in widths), tuple(draw(V, width) for width in widths), draw(V) if bias else None
    )
    leaves = [*products.inputs, *products.weights, *([products.bias] if bias else [])]
    index = torch.randint(0, V, (N,), generator=generator)
    layer = OutputLayer(nn.Identity(), scale, cap)
    want = scores_from_logits(layer, products, index, temperature)
    got = compute_scores(layer, products, index, temperature=temperature, with_entropy=with_entropy)
    factors = draw(2, N).detach()
    used = slice(None) if with_entropy else slice(1)
    for ours, theirs in zip(got[used], want[used], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    ours, theirs = (
        torch.autograd.grad(sum((value * factor).sum() for value, factor in zip(both[used], factors[used], strict=True)), leaves)
        for both in (got, want)
    )
    for mine, theirs_ in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, theirs_, rtol=1e-5, atol=1e-5 * max(1.0, theirs_.abs().max().item()))


def test_the_example_of_the_module(monkeypatch):
    monkeypatch.setattr(token_scores, "LEAST_COLUMNS", 2)
    monkeypatch.setattr(token_scores, "TILE_ELEMENTS", 1)
    products = Products((torch.ones(1, 1),), (torch.tensor([[0.0], [0.0], [math.log(2.0)]]),), None)
    logp, entropy = compute_scores(OutputLayer(nn.Identity()), products, torch.tensor([2]), with_entropy=True)
    assert logp.tolist() == pytest.approx([-math.log(2.0)])
    assert entropy.tolist() == pytest.approx([1.5 * math.log(2.0)])


@pytest.mark.parametrize("with_entropy", [False, True])
def test_impossible_tokens_have_probability_0_and_finite_gradients(monkeypatch, with_entropy):
    monkeypatch.setattr(token_scores, "LEAST_COLUMNS", 1)
    monkeypatch.setattr(token_scores, "TILE_ELEMENTS", 1)
    bias = torch.tensor([-math.inf, 0.0, 0.0, -math.inf])
    hidden = torch.zeros(1, 2, requires_grad=True)
    products = Products((hidden,), (torch.ones(4, 2),), bias)
    logp, entropy = compute_scores(OutputLayer(nn.Identity()), products, torch.tensor([1]), with_entropy=with_entropy)
    (logp + entropy).sum().backward()
    assert logp.item() == pytest.approx(-math.log(2.0))
    assert entropy.item() == pytest.approx(math.log(2.0) if with_entropy else 0.0)
    assert torch.isfinite(hidden.grad).all()


def test_only_the_tokens_of_the_mask_are_scored():
    head = nn.Linear(D, V)
    hidden, ids = torch.randn(2, 4, D), torch.randint(0, V, (2, 4))
    mask = torch.tensor([[1, 0, 0.5, 1], [0, 1, 0, 0]])
    every = TokenScores(hidden, OutputLayer(head), ids, temperature=0.7)
    some = TokenScores(hidden, OutputLayer(head), ids, mask=mask, temperature=0.7)
    logits = head(hidden) / 0.7
    torch.testing.assert_close(every.logp, compute_token_logp(logits, ids))
    torch.testing.assert_close(every.entropy, compute_token_entropy(logits))
    torch.testing.assert_close(some.logp, every.logp * (mask[:, 1:] > 0))
    torch.testing.assert_close(some.entropy, every.entropy * (mask[:, 1:] > 0))


def test_without_a_token_to_score_all_gradients_are_0():
    head, hidden = nn.Linear(D, V), torch.randn(1, 3, D, requires_grad=True)
    scores = TokenScores(hidden, OutputLayer(head), torch.zeros(1, 3, dtype=torch.long), mask=torch.zeros(1, 3))
    scores.logp.sum().backward()
    assert [gradient.abs().max().item() for gradient in (hidden.grad, head.weight.grad, head.bias.grad)] == [0.0, 0.0, 0.0]


def test_a_frozen_layer_gets_no_gradient():
    head, hidden = nn.Linear(D, V).requires_grad_(False), torch.randn(1, 3, D, requires_grad=True)
    TokenScores(hidden, OutputLayer(head), torch.zeros(1, 3, dtype=torch.long)).logp.sum().backward()
    assert head.weight.grad is None
    assert hidden.grad.abs().max() > 0


def test_under_autocast_the_products_are_in_bfloat16_as_those_of_the_model():
    head, hidden = nn.Linear(64, 600), torch.randn(1, 9, 64, requires_grad=True)
    ids = torch.randint(0, 600, (1, 9))
    gradients, values = [], []
    for ours in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logp = TokenScores(hidden, OutputLayer(head), ids).logp if ours else compute_token_logp(head(hidden), ids)
        gradients.append(torch.autograd.grad(logp.sum(), [hidden, head.weight, head.bias]))
        values.append(logp)
    assert values[1].dtype == torch.float32
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=1e-5)
    for theirs, mine in zip(*gradients, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-2 * theirs.abs().max().item())


def test_tiles_on_a_gpu_are_four_times_as_large_and_cover_the_vocabulary():
    def tiles(device):
        hidden, weights = torch.empty(4096, 2, device=device), torch.empty(151_936, 2, device=device)
        return token_scores._tiles(Products((hidden,), (weights,), None))

    assert [len(tiles(device)) for device in ("cpu", "meta")] == [149, 38]  # 151936 / (2^22 / 2^12) and / (2^24 / 2^12)
    for parts in (tiles("cpu"), tiles("meta")):
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == 151_936


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    columns=st.integers(1, V),
    cap=st.sampled_from([None, 5.0]),
    temperature=st.sampled_from([1.0, 0.6]),
)
def test_in_half_precision_scores_are_those_of_the_rounded_logits(monkeypatch, dtype, seed, columns, cap, temperature):
    """The logits are rounded once to the dtype, as the model's own are; all else is in float32."""
    monkeypatch.setattr(token_scores, "LEAST_COLUMNS", columns)
    monkeypatch.setattr(token_scores, "TILE_ELEMENTS", 1)
    generator = torch.Generator().manual_seed(seed)
    hidden, weights = (torch.randn(n, D, generator=generator).to(dtype).requires_grad_() for n in (N, V))
    index = torch.randint(0, V, (N,), generator=generator)
    layer = OutputLayer(nn.Identity(), 1.0, cap)
    logp, entropy = compute_scores(
        layer, Products((hidden,), (weights,), None), index, temperature=temperature, with_entropy=True
    )
    logits = (hidden @ weights.T).detach()
    logits = (logits if cap is None else torch.tanh(logits / cap) * cap).float().requires_grad_()
    every = torch.log_softmax(logits / temperature, dim=-1)
    want, spread = every.gather(1, index[:, None]).squeeze(1), -(every.exp() * every).sum(dim=1)
    torch.testing.assert_close((logp, entropy), (want, spread), rtol=0, atol=1e-5)
    factors = torch.randn(2, N, generator=generator)
    got = torch.autograd.grad((logp * factors[0] + entropy * factors[1]).sum(), [hidden, weights])
    (of_logits,) = torch.autograd.grad((want * factors[0] + spread * factors[1]).sum(), logits)
    slope = 1.0 if cap is None else 1 - (logits.detach() / cap) ** 2
    rounding = 4 * torch.finfo(dtype).eps
    for mine, theirs in zip(got, (of_logits * slope @ weights.float(), (of_logits * slope).T @ hidden.float()), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.float(), theirs, rtol=0, atol=rounding * max(1.0, float(theirs.detach().abs().max())))


def test_memory_is_a_fraction_of_that_of_the_logits(monkeypatch):
    monkeypatch.setattr(token_scores, "TILE_ELEMENTS", 1 << 14)
    shape = (4, 64, 16, 8192)
    with_all, without = measure(with_logits, shape), measure(without_logits, shape)
    assert without["value"] == pytest.approx(with_all["value"], rel=1e-5)
    assert without["squares"] == pytest.approx(with_all["squares"], rel=1e-5)
    in_bfloat16 = 4 * 64 * 8192 * 2
    assert without["bytes"] < 0.25 * in_bfloat16 < 2 * in_bfloat16 < with_all["bytes"]
