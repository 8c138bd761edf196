"""The main invariant: however a batch is split, laid out and ordered, its gradient is that of the
unsplit batch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from loss_batches import Bigram, packed, padded, rows

from ludic.training.algorithm import RLAlgorithm
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import (
    BatchTotals,
    BradleyTerryLoss,
    CISPOLoss,
    ClippedSurrogateLoss,
    CompositeLoss,
    EntropyBonus,
    GMPOLoss,
    KLLoss,
    LossTerm,
    MaskedCausalLMCrossEntropyLoss,
    ReinforceBaselineLoss,
    ReinforceLoss,
    SAPOLoss,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
)

LOSSES = {
    "reinforce": ReinforceLoss(length_normalize=True),
    "baseline": ReinforceBaselineLoss(length_normalize=True),
    "normalised baseline": ReinforceBaselineLoss(normalize=True, length_normalize=True),
    "gspo": ClippedSurrogateLoss(0.2, 0.3, length_normalize=True),
    "grpo": TokenClippedSurrogateLoss(),
    "grpo over tokens": TokenClippedSurrogateLoss(normalizer="tokens"),
    "cispo": CISPOLoss(),
    "cispo over tokens": CISPOLoss(length_normalize=False, normalizer="tokens"),
    "sapo": SAPOLoss(),
    "sapo over tokens": SAPOLoss(normalizer="tokens"),
    "gmpo": GMPOLoss(),
    "kl by token": TokenKLLoss(coeff=0.3, estimator="k3"),
    "kl by sequence": KLLoss(coeff=0.3, length_normalize=True),
    "entropy": EntropyBonus(coeff=0.3),
    "cross entropy": MaskedCausalLMCrossEntropyLoss(),
    "cross entropy over tokens": MaskedCausalLMCrossEntropyLoss(length_normalize=False, normalizer="tokens"),
    "composite": CompositeLoss(
        [
            LossTerm("pg", CISPOLoss()),
            LossTerm("h", EntropyBonus(0.5)),
            LossTerm("b", ReinforceBaselineLoss(length_normalize=True), 0.1),
        ]
    ),
}


def totals_of(samples):
    weights = torch.stack([s["weight"] for s in samples]).numpy()
    targets = torch.stack([s["action_mask"][1:].sum() for s in samples]).long().numpy()
    return BatchTotals.from_columns(weights, targets)


def gradient(loss, parts, collate, totals=None):
    model = Bigram()
    algorithm = RLAlgorithm("test", ConstantCredit(), loss)
    total = 0.0
    for part in parts:
        value, _ = algorithm.compute_loss(model, collate(part), totals=totals)
        value.backward()
        total += value.item()
    return model.table.grad, total


@st.composite
def partitions(draw):
    """Samples in random order, cut into micro-batches at random places."""
    samples = rows(draw(st.integers(1, 12)), seed=draw(st.integers(0, 10_000)))
    order = draw(st.permutations(range(len(samples))))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(samples) - 1)))) & set(range(1, len(samples))))
    shuffled = [samples[i] for i in order]
    return samples, [shuffled[a:b] for a, b in zip([0, *cuts], [*cuts, len(samples)], strict=True)]


@pytest.mark.parametrize("name", LOSSES)
@given(partition=partitions(), extra=st.integers(0, 3), layout=st.sampled_from(["padded", "padding-free"]))
def test_the_gradient_does_not_depend_on_the_split(name, partition, extra, layout):
    samples, parts = partition
    loss = LOSSES[name]
    whole, value = gradient(loss, [samples], padded)
    collate = packed if layout == "padding-free" else lambda part: padded(part, extra)
    split, total = gradient(loss, parts, collate, totals_of(samples))
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-6 * max(1.0, whole.abs().max().item()))
    assert total == pytest.approx(value, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@given(partition=partitions())
def test_samples_of_weight_zero_can_be_left_out_when_the_loss_allows_it(name, partition):
    samples, parts = partition
    loss = LOSSES[name]
    nonzero_parts = [[s for s in part if s["weight"] != 0] for part in parts]
    nonzero_parts = [part for part in nonzero_parts if part]
    if not nonzero_parts or not loss.zero_weight_is_zero_gradient:
        return
    whole, _ = gradient(loss, [samples], padded)
    without, _ = gradient(loss, nonzero_parts, padded, totals_of(samples))
    torch.testing.assert_close(without, whole, rtol=0, atol=1e-6 * max(1.0, whole.abs().max().item()))


def test_losses_that_need_samples_of_weight_zero_declare_it():
    needing = {name for name, loss in LOSSES.items() if not loss.zero_weight_is_zero_gradient}
    assert needing == {"baseline", "normalised baseline", "kl by token", "kl by sequence", "entropy", "composite"}


@pytest.mark.parametrize("name", LOSSES)
def test_a_transformer_gives_the_same_gradient_padded_split_and_padding_free(name):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=11, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    samples = rows(6, seed=3)
    algorithm = RLAlgorithm("test", ConstantCredit(), LOSSES[name])

    def flat(parts, collate, totals):
        model.zero_grad()
        for part in parts:
            algorithm.compute_loss(model, collate(part), totals=totals)[0].backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole = flat([samples], padded, None)
    assert whole.abs().max() > 1e-3
    totals = totals_of(samples)
    torch.testing.assert_close(flat([samples[:2], samples[2:3], samples[3:]], padded, totals), whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(flat([samples[4:], samples[:4]], packed, totals), whole, rtol=0, atol=1e-6)


PREFERENCE_LOSSES = {
    "bradley-terry": BradleyTerryLoss(beta=0.7, label_smoothing=0.1, score_type="logprob"),
    "bradley-terry with l1": BradleyTerryLoss(regularization_lambda=0.3, regularization_type="l1", score_type="logprob"),
    "bradley-terry with l2": BradleyTerryLoss(regularization_lambda=0.3, score_type="logprob"),
    "bradley-terry with small scores": BradleyTerryLoss(score_regularization_lambda=0.01, score_type="logprob"),
    "bradley-terry with centred scores": BradleyTerryLoss(
        score_regularization_lambda=0.01, score_regularization_type="squared_sum", score_type="logprob"
    ),
    "bradley-terry and cross entropy": CompositeLoss(
        [
            LossTerm("bt", BradleyTerryLoss(regularization_lambda=0.3, score_type="logprob")),
            LossTerm("sft", MaskedCausalLMCrossEntropyLoss(length_normalize=False, normalizer="tokens"), 0.2),
        ]
    ),
}


@st.composite
def partitions_of_pairs(draw):
    """Pairs in random order, some with the rejected sample first, cut into micro-batches between
    pairs."""
    count = draw(st.integers(1, 6))
    samples = rows(2 * count, seed=draw(st.integers(0, 10_000)))
    pairs = []
    for pair in range(count):
        halves = [{**samples[2 * pair + k], "meta": (pair, role, pair % 3 / 2)} for k, role in enumerate(("chosen", "rejected"))]
        pairs.append(halves[::-1] if draw(st.booleans()) else halves)
    order = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, count - 1)))) & set(range(1, count)))
    bounds = zip([0, *cuts], [*cuts, count], strict=True)
    return [half for pair in pairs for half in pair], [[half for index in order[a:b] for half in pairs[index]] for a, b in bounds]


def with_meta(collate):
    def collated(part):
        columns = zip(*(sample["meta"] for sample in part), strict=True)
        return {**collate(part), "meta": dict(zip(("pair_id", "role", "label"), map(list, columns), strict=True))}

    return collated


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
@given(partition=partitions_of_pairs(), layout=st.sampled_from(["padded", "padding-free"]))
def test_the_gradient_does_not_depend_on_the_split_of_pairs(name, partition, layout):
    samples, parts = partition
    loss = PREFERENCE_LOSSES[name]
    whole, value = gradient(loss, [samples], with_meta(padded))
    collate = with_meta(packed if layout == "padding-free" else padded)
    totals = replace(totals_of(samples), num_pairs=len(samples) / 2)
    if loss.needs_first_pass:
        model = Bigram()
        sums_of_parts = [loss.first_pass(model(batch["input_ids"]), batch) for batch in map(collate, parts)]
        totals = replace(totals, measured={"squared_margins": sum(sums["squared_margins"] for sums in sums_of_parts).detach()})
    split, total = gradient(loss, parts, collate, totals)
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-6 * max(1.0, whole.abs().max().item()))
    assert total == pytest.approx(value, abs=1e-5, rel=1e-5)
