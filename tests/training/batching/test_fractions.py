"""Tokens that count in part: losses and gradients are those of formulas written by hand, however a
batch is divided; a fraction of 1 changes no bit; what cannot count in part is refused."""

import asyncio
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from preference_samples import sorted_pairs
from training_samples import assert_same_tensors, cpu_config, dialogues, gradients_of, sorting_items, tiny_model

from ludic.errors import DataError, DataTypeError
from ludic.training import RLAlgorithm, SampleAttachments, SAWItem, collate_saw_items
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.packing import collate_micro_batches
from ludic.training.batching.pair_batches import PreferenceMacroBatch
from ludic.training.batching.rank_plans import RankShare
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.evaluators.held_out import HeldOutLoss
from ludic.training.loss import (
    ClippedSurrogateLoss,
    CompositeLoss,
    KLLoss,
    LossTerm,
    MaskedCausalLMCrossEntropyLoss,
    ReferenceKLLoss,
    SharedContext,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
)
from ludic.training.preparation import candidates_of

FRACTIONS = (0.25, 0.5, 1.0, 1.75)


def in_part(items, seed=0):
    """The items with random fractions; every third has none."""
    draw = random.Random(seed)
    parts = [[draw.choice(FRACTIONS) for action in item.action_mask if action] for item in items]
    return [
        replace(item, attachments=replace(item.attachments, action_fractions=None if row % 3 == 2 else part))
        for row, (item, part) in enumerate(zip(items, parts, strict=True))
    ]


def mask_of(items, width):
    """[B, T - 1], written by hand."""
    rows = torch.zeros(len(items), width)
    for row, item in zip(rows, items, strict=True):
        given = item.attachments.action_fractions
        row[: len(item.action_mask)] = torch.tensor(item.action_mask, dtype=torch.float32)
        row[row != 0] = torch.ones(sum(item.action_mask)) if given is None else torch.tensor(given)
    return rows[:, 1:]


def k3(difference):
    return torch.exp(-difference) - 1 + difference


def clipped(ratio, weight):
    return torch.minimum(ratio * weight, ratio.clamp(0.8, 1.3) * weight)


CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.3}
# m: what tokens count for; p: log-probability, d: minus the sampler's, r: minus the reference's;
# w: credit of rows
BY_HAND = {
    "a mean over tokens": (
        MaskedCausalLMCrossEntropyLoss(length_normalize=False, normalizer="tokens"),
        lambda m, p, d, r, w: -(m * w[:, None] * p).sum() / m.sum(),
    ),
    "a mean over the tokens of rows": (
        TokenClippedSurrogateLoss(**CLIP, length_normalize=True),
        lambda m, p, d, r, w: -((m * clipped(d.exp(), w[:, None])).sum(1) / m.sum(1).clamp(min=1)).mean(),
    ),
    "sums of rows": (
        TokenClippedSurrogateLoss(**CLIP),
        lambda m, p, d, r, w: -(m * clipped(d.exp(), w[:, None])).sum(1).mean(),
    ),
    "a ratio of rows": (
        ClippedSurrogateLoss(**CLIP, length_normalize=True),
        lambda m, p, d, r, w: -clipped(((m * d).sum(1) / m.sum(1).clamp(min=1)).exp(), w).mean(),
    ),
    "a KL of tokens": (
        TokenKLLoss(coeff=1.0, estimator="k3"),
        lambda m, p, d, r, w: ((m * k3(d)).sum(1) / m.sum(1).clamp(min=1)).mean(),
    ),
    "a KL to a reference": (ReferenceKLLoss(coeff=1.0), lambda m, p, d, r, w: (m * k3(r)).sum() / m.sum()),
    "its form of sequences": (
        ReferenceKLLoss(coeff=1.0, level="sequence"),
        lambda m, p, d, r, w: (m.sum(1) * k3((m * r).sum(1) / m.sum(1).clamp(min=1))).sum() / m.sum(),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_loss_and_its_gradient_are_those_of_the_weighted_formula(name):
    loss, by_hand = BY_HAND[name]
    items = in_part(sorting_items(6, seed=1))
    batch = collate_saw_items(items, pad_token_id=0, device="cpu")
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(*batch["input_ids"].shape, 80, generator=generator, requires_grad=True)
    batch["reference_logps"] = -4 * torch.rand(batch["input_ids"].shape, generator=generator)
    value, _ = loss.compute_from(SharedContext(logits, batch))
    [gradient] = torch.autograd.grad(value, logits)

    own = logits.detach().double().requires_grad_()
    logp = own.log_softmax(-1)[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    mask = mask_of(items, batch["input_ids"].shape[1]).double()
    sampled, reference = (batch[key][:, 1:].double() for key in ("actor_logps", "reference_logps"))
    difference = (logp - sampled) * (mask != 0)
    expected = by_hand(mask, logp, difference, logp - reference, batch["weight"].double())
    [expected_gradient] = torch.autograd.grad(expected, own)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(gradient.double(), expected_gradient, atol=1e-6)
    assert expected_gradient.abs().max() > 1e-3


WITHOUT_REFERENCE = [loss for loss, _ in BY_HAND.values() if not loss.reads_reference]
EVERY = CompositeLoss([LossTerm(f"loss{index}", loss) for index, loss in enumerate([*WITHOUT_REFERENCE, KLLoss(coeff=1.0)])])
ALGORITHM = RLAlgorithm("in part", ConstantCredit(1.0), EVERY)


@cache
def model():
    return tiny_model()


@cache
def turns():
    """Nine samples of four episodes, one of which begins with an action."""
    first, *rest = in_part(dialogues((3, 1, 3, 2), seed=5), seed=1)
    return (replace(first, action_mask=[1, *first.action_mask[1:]], attachments=_one_more(first.attachments)), *rest)


def _one_more(attachments):
    logps = replace(attachments.actor_logps, token_logps=[-9.0, *attachments.actor_logps.token_logps])
    return SampleAttachments(logps, action_fractions=[0.125, *attachments.action_fractions])


def gradient(micro_batches, totals):
    model().zero_grad(set_to_none=True)

    async def compute():
        return await TorchBackend(model(), cpu_config(), algo=ALGORITHM).forward_backward(micro_batches, totals=totals).result()

    result = asyncio.run(compute())
    return gradients_of(model()), result.loss.item()


@cache
def undivided():
    batch = collate_saw_items(turns(), pad_token_id=0, device="cpu")
    model().zero_grad(set_to_none=True)
    loss, _ = ALGORITHM.compute_loss(model(), batch)
    loss.backward()
    return gradients_of(model()), loss.item()


@settings(max_examples=6, deadline=None)
@given(
    budget=st.integers(70, 260),
    packing=st.sampled_from(["greedy", "optimal", "padding_free"]),
    merge_turns=st.booleans(),
    world=st.sampled_from([None, 2]),
)
def test_the_gradient_does_not_depend_on_how_a_batch_is_divided(budget, packing, merge_turns, world):
    expected, expected_loss = undivided()
    cfg = cpu_config(max_seq_len=70, micro_token_budget=budget, packing=packing)
    macro = MacroBatch.ingest(turns(), cfg.max_seq_len, merge_turns=merge_turns)
    shares = [None] if world is None else [RankShare(rank, world) for rank in range(world)]
    parts = [MiniBatch(replace(macro, share=share), np.arange(len(turns())), cfg) for share in shares]
    got, loss = gradient([micro_batch for part in parts for micro_batch in part], parts[0].totals)
    assert_same_tensors(got, expected, atol=1e-6 * max(1.0, max(each.abs().max().item() for each in expected.values())))
    assert loss == pytest.approx(expected_loss, rel=1e-5)


@pytest.mark.parametrize("packing", ["optimal", "padding_free"])
def test_fractions_of_one_change_no_bit(packing):
    plain = sorting_items(5, seed=3)
    ones = [
        replace(each, attachments=replace(each.attachments, action_fractions=[1.0] * sum(each.action_mask))) for each in plain
    ]
    cfg = cpu_config(packing=packing)
    batches = [MiniBatch(MacroBatch.ingest(items, 32), np.arange(5), cfg) for items in (plain, ones)]
    assert batches[0].totals == batches[1].totals
    for without, with_ones in zip(*batches, strict=True):
        assert without.tensors.keys() == with_ones.tensors.keys()
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(with_ones.tensors[name]))
            for name, value in without.tensors.items()
        )


def test_a_cut_keeps_the_fractions_of_the_tokens_that_are_left():
    item = SAWItem([5, 6, 7, 8], [1] * 4, [0, 1, 1, 1], 1.0, attachments=SampleAttachments(action_fractions=[0.5, 0.25, 2.0]))
    macro = MacroBatch.ingest([item, replace(item, attachments=SampleAttachments())], 3)
    assert macro.items[0].attachments.action_fractions == [0.5, 0.25]
    mini_batch = MiniBatch(macro, np.arange(2), cpu_config(max_seq_len=3))
    assert mini_batch.totals.num_tokens == 2.75
    [micro_batch] = mini_batch
    assert sorted(micro_batch.tensors["action_mask"].tolist()) == [[0, 0.5, 0.25], [0, 1, 1]]
    [own] = collate_micro_batches([item], pad_token_id=0, device="cpu", micro_token_budget=9, max_seq_len=3)
    assert own.tensors["action_mask"].tolist() == [[0, 0.5, 0.25]]


def test_samples_of_weight_zero_that_are_skipped_count_in_part():
    items = [replace(item, weight=float(row % 2)) for row, item in enumerate(in_part(sorting_items(4)))]
    macro = MacroBatch.ingest(items, 32)
    mini_batch = MiniBatch(macro, np.arange(4), cpu_config(), skip_zero_weight=True)
    assert mini_batch.skipped_tokens == mask_of(items, 32)[::2].sum()
    assert mini_batch.totals.num_tokens == mask_of(items, 32).sum()


def test_the_held_out_loss_is_the_weighted_mean():
    items, cfg = in_part(sorting_items(5, weight=1.0)), cpu_config()
    batch = collate_saw_items(items, pad_token_id=0, device="cpu")
    with torch.no_grad():
        logits = model().eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logp = SharedContext(logits, batch).token_logp
    mask = mask_of(items, batch["input_ids"].shape[1])
    measured = HeldOutLoss(model(), items, cfg).measure()
    assert measured["loss"] == pytest.approx(-float((mask * logp).sum() / mask.sum()), rel=1e-5)
    assert measured["tokens"] == mask.sum()


def test_other_fractions_are_another_batch():
    items = sorting_items(4)
    digests = {MacroBatch.ingest(each, 32).digest() for each in (items, in_part(items), in_part(items, seed=1))}
    assert len(digests) == 3
    state = ItemBatchSource(in_part(items), batch_size=2, seed=0).state_dict()
    with pytest.raises(Exception, match="digest"):
        ItemBatchSource(in_part(items, seed=1), batch_size=2, seed=0).load_state_dict(state)


@pytest.mark.parametrize(
    ("fractions", "problem"),
    [
        ([0.5], "sample 0 has 1 action_fractions for 2 action"),
        ([0.5, 0.0], r"action_fractions\[1\] of sample 0 is 0\.0 .*> 0"),
        ([-0.5, 1.0], r"action_fractions\[0\] of sample 0 is -0.5"),
        ([0.5, 1e-60], r"action_fractions\[1\] of sample 0 is 0.0"),
        ([0.5, 1e60], "is inf in float32"),
        ([0.5, float("nan")], "is nan in float32"),
    ],
)
def test_fractions_that_cannot_be_are_named(fractions, problem):
    item = SAWItem([5, 6, 7], [1] * 3, [0, 1, 1], 1.0, attachments=SampleAttachments(action_fractions=fractions))
    for read in (lambda: MacroBatch.ingest([item], 8), lambda: collate_saw_items([item], pad_token_id=0, device="cpu")):
        with pytest.raises(DataError, match=problem):
            read()


def test_what_has_no_tokens_in_part_refuses_them():
    with pytest.raises(DataTypeError, match="action_fractions must be a List"):
        SampleAttachments(action_fractions="half")
    pairs = [
        replace(item, attachments=SampleAttachments(action_fractions=[0.5] * sum(item.action_mask))) for item in sorted_pairs(2)
    ]
    with pytest.raises(DataError, match=r"preference sample has one score, .*part"):
        PreferenceMacroBatch.ingest_pairs(pairs, 32)
    with pytest.raises(DataError, match="a batch credit compares whole answers"):
        candidates_of(MacroBatch.ingest(in_part(sorting_items(4)), 32))
