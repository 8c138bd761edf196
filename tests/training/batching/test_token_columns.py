"""Token columns: credit for each token gives the gradient of a formula written by hand; constant
arrays give that of numbers bit for bit, in every layout, tree and rank; a column travels with its
sample."""

import asyncio
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from training_samples import branching_items, cpu_config, dialogues, gradients_of, sorting_items, tiny_model

from ludic.errors import DataError, DataTypeError
from ludic.training import RLAlgorithm, SampleAttachments, SAWBatch, SAWItem, collate_saw_items
from ludic.training.algorithm import drop_zero_weight_samples, filter_zero_variance_groups
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.packing import collate_micro_batches
from ludic.training.batching.rank_plans import RankShare
from ludic.training.batching.sample_codec import decode_batch, encode_batch
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import (
    CISPOLoss,
    ClippedSurrogateLoss,
    GMPOLoss,
    ListwiseLoss,
    MaskedCausalLMCrossEntropyLoss,
    ReinforceBaselineLoss,
    ReinforceLoss,
    SAPOLoss,
    SharedContext,
    TokenClippedSurrogateLoss,
)
from ludic.training.preparation import candidates_of
from ludic.training.queue.entries import EntryError, SampleGroup, decode_samples, encode_samples

PER_TOKEN = {
    "clipped, tokens": TokenClippedSurrogateLoss(normalizer="tokens"),
    "clipped, rows": TokenClippedSurrogateLoss(length_normalize=True, ratio_clip=2.0),
    "cispo": CISPOLoss(),
    "sapo": SAPOLoss(),
    "reinforce": ReinforceLoss(ratio_clip=2.0),
    "reinforce, means": ReinforceLoss(length_normalize=True),
    "cross-entropy": MaskedCausalLMCrossEntropyLoss(),
}
WHOLE = [ClippedSurrogateLoss(length_normalize=True), GMPOLoss(), ListwiseLoss(), ReinforceBaselineLoss()]


def with_credit(items, credit):
    """The items with a column of credit, by item; None leaves the item as it is."""

    def change(item, values):
        attached = replace(item.attachments, token_columns={} if values is None else {"token_weight": values})
        return replace(item, weight=item.weight if values is None else float(np.mean(values)), attachments=attached)

    return [change(item, credit(row, item)) for row, item in enumerate(items)]


def constant(row, item):
    """Every third item has no column: a number fills its tokens."""
    return None if row % 3 == 2 else np.full(sum(item.action_mask), item.weight)


def drawn(row, item):
    draw = random.Random(row)
    return [draw.choice([-1.0, 0.0, 0.5, 2.0]) for action in item.action_mask if action]


@cache
def model():
    return tiny_model()


def make_config(kind, budget=128):
    sharing = "tree" if kind == "trees" else "off"
    packing = "padding_free" if kind == "padding_free" else "optimal"
    return cpu_config(max_seq_len=70, micro_token_budget=budget, packing=packing, prefix_sharing=sharing)


def gradient(loss, micro_batches, totals, kind="padded"):
    model().zero_grad(set_to_none=True)
    algo = RLAlgorithm("tokens", ConstantCredit(1.0), loss)

    backend = TorchBackend(model(), make_config(kind), algo=algo)
    assert backend.shares_prefixes == (kind == "trees")

    async def compute():
        await backend.forward_backward(micro_batches, totals=totals).result()

    asyncio.run(compute())
    return gradients_of(model())


def micro_batches_of(items, *, kind="padded", world=1, merge_turns=False, budget=128):
    cfg = make_config(kind, budget)
    macro = MacroBatch.ingest(items, cfg.max_seq_len, merge_turns=merge_turns)
    shares = [None] if world == 1 else [RankShare(rank, world) for rank in range(world)]
    make = TreeMiniBatch if kind == "trees" else MiniBatch
    parts = [make(replace(macro, share=share), np.arange(len(macro.items)), cfg) for share in shares]
    return [micro_batch for part in parts for micro_batch in part], parts[0].totals


SHAPES = [
    {"kind": "padded"},
    {"kind": "padding_free"},
    {"kind": "padded", "merge_turns": True},
    {"kind": "padding_free", "merge_turns": True, "world": 2},
    {"kind": "trees"},
    {"kind": "trees", "world": 2},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: " ".join(map(str, shape.values())))
@pytest.mark.parametrize("name", PER_TOKEN)
def test_constant_arrays_give_the_gradient_of_numbers_bit_for_bit(name, shape):
    items = branching_items((4, 3, 2), seed=0) if shape["kind"] == "trees" else dialogues((3, 1, 3), seed=0)
    numbers, totals = micro_batches_of(items, **shape)
    arrays, same_totals = micro_batches_of(with_credit(items, constant), **shape)
    assert totals == same_totals
    assert all("token_weight" in each.tensors for each in arrays)
    assert not any("token_weight" in each.tensors for each in numbers)
    expected = gradient(PER_TOKEN[name], numbers, totals, shape["kind"])
    got = gradient(PER_TOKEN[name], arrays, totals, shape["kind"])
    assert all(torch.equal(got[key], expected[key]) for key in expected)
    assert max(each.abs().max() for each in expected.values()) > 1e-4


def clipped(ratio, weight):
    return torch.minimum(ratio * weight, ratio.clamp(0.8, 1.27) * weight)


# m: 1 on action tokens, p: log-probability, d: minus the sampler's, w: credit of tokens
BY_HAND = {
    "clipped, tokens": lambda m, p, d, w: -(m * clipped(d.exp(), w)).sum() / m.sum(),
    "cispo": lambda m, p, d, w: -((m * d.exp().detach().clamp(max=1.2) * w * p).sum(1) / m.sum(1)).mean(),
    "sapo": lambda m, p, d, w: -(m * 4 / tau(w) * torch.sigmoid(tau(w) * (d.exp() - 1)) * w).sum(1).mean(),
    "reinforce": lambda m, p, d, w: -((m * d).sum(1).exp().detach().clamp(max=2) * (m * w * p).sum(1)).mean(),
    "cross-entropy": lambda m, p, d, w: -((m * w * p).sum(1) / m.sum(1)).mean(),
}


def tau(weight):
    return torch.where(weight > 0, 1.0, 1.05)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_loss_and_its_gradient_are_those_of_the_formula_with_a_weight_for_each_token(name):
    items = with_credit(sorting_items(6, seed=1), drawn)
    batch = collate_saw_items(items, pad_token_id=0, device="cpu")
    logits = torch.randn(*batch["input_ids"].shape, 80, generator=torch.Generator().manual_seed(2), requires_grad=True)
    value, _ = PER_TOKEN[name].compute_from(SharedContext(logits, batch))
    [gradient] = torch.autograd.grad(value, logits)

    own = logits.detach().double().requires_grad_()
    logp = own.log_softmax(-1)[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    mask, weight = torch.zeros(2, *batch["input_ids"].shape, dtype=torch.float64)
    for row, item in enumerate(items):
        mask[row, : len(item.action_mask)] = torch.tensor(item.action_mask)
        weight[row, mask[row] == 1] = torch.tensor(item.attachments.token_columns["token_weight"], dtype=torch.float64)
    mask, weight = mask[:, 1:], weight[:, 1:]
    expected = BY_HAND[name](mask, logp, (logp - batch["actor_logps"][:, 1:].double()) * mask, weight)
    [expected_gradient] = torch.autograd.grad(expected, own)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(gradient.double(), expected_gradient, atol=1e-6)
    assert expected_gradient.abs().max() > 1e-3


@settings(max_examples=8, deadline=None)
@given(
    shape=st.sampled_from(SHAPES), budget=st.integers(70, 260), name=st.sampled_from(["clipped, tokens", "cispo", "reinforce"])
)
def test_the_gradient_does_not_depend_on_how_a_batch_is_divided(shape, budget, name):
    items = with_credit(dialogues((3, 1, 2), seed=3), drawn)
    batch = collate_saw_items(items, pad_token_id=0, device="cpu")
    model().zero_grad(set_to_none=True)
    RLAlgorithm("tokens", ConstantCredit(1.0), PER_TOKEN[name]).compute_loss(model(), batch)[0].backward()
    expected = gradients_of(model())
    got = gradient(PER_TOKEN[name], *micro_batches_of(items, budget=budget, **shape), shape["kind"])
    largest = max(1.0, max(each.abs().max().item() for each in expected.values()))
    assert all(torch.allclose(got[key], expected[key], atol=2e-6 * largest, rtol=1e-4) for key in expected)


@pytest.mark.parametrize("loss", WHOLE, ids=lambda loss: type(loss).__name__)
def test_losses_of_whole_answers_refuse_credit_for_tokens(loss):
    batch = collate_saw_items(with_credit(sorting_items(2), drawn), pad_token_id=0, device="cpu")
    with pytest.raises(DataError, match=r"token_weight, .*whole answers; use a loss"):
        loss.compute_from(SharedContext(torch.zeros(*batch["input_ids"].shape, 80), batch))


def test_a_batch_credit_refuses_credit_for_tokens():
    with pytest.raises(DataError, match="whole answers, but samples have token_weight"):
        candidates_of(MacroBatch.ingest(with_credit(sorting_items(2), drawn), 32))


def item_of(credit, **columns):
    attached = SampleAttachments(token_columns={"token_weight": credit, **columns})
    return SAWItem([5, 6, 7], [1] * 3, [0, 1, 1], 0.5, {"rollout_id": "r"}, attached)


def test_a_sample_whose_tokens_cancel_out_is_trained():
    items = [item_of([1.0, -1.0]), item_of([0.0, 0.0])]
    macro = MacroBatch.ingest(items, 8)
    assert MiniBatch(macro, np.arange(2), cpu_config(), skip_zero_weight=True).rows.tolist() == [0]
    assert drop_zero_weight_samples(SAWBatch(list(items))).items == items[:1]
    for item in items:
        item.meta["request_meta"] = {"group_id": 0}
    assert filter_zero_variance_groups(SAWBatch(list(items))).items == items
    assert filter_zero_variance_groups(SAWBatch([items[1], items[1]])).items == []


def test_a_cut_keeps_the_values_of_the_tokens_that_are_left():
    long = SAWItem(
        [5, 6, 7, 8], [1] * 4, [0, 1, 1, 1], 0.5, {}, SampleAttachments(token_columns={"token_weight": [0.5, 2.0, -1.0]})
    )
    macro = MacroBatch.ingest([long, item_of([3.0, 4.0])], 3)
    assert macro.items[0].attachments.token_columns == {"token_weight": [0.5, 2.0]}
    assert macro.table.token_column("token_weight").tolist() == [0, 0.5, 2, 0, 3, 4]
    [own] = collate_micro_batches([long], pad_token_id=0, device="cpu", micro_token_budget=9, max_seq_len=3)
    assert own.tensors["token_weight"].tolist() == [[0, 0.5, 2]]


def test_a_column_of_the_users_reaches_the_loss():
    items = [item_of([1.0, 2.0], confidence=[0.25, 0.5]), item_of([0.0, 3.0], confidence=np.array([1.0, -1.0], np.float32))]
    [micro_batch] = MiniBatch(MacroBatch.ingest(items, 8), np.arange(2), cpu_config(packing="padding_free"))
    shared = SharedContext(torch.zeros(1, 6, 9), micro_batch.tensors)
    assert sorted(shared.read_logps("confidence").tolist()) == [[0.25, 0.5], [1, -1]]
    with pytest.raises(DataError, match="sample 1 has no token column confidence"):
        MacroBatch.ingest([items[0], item_of([0.0, 3.0])], 8)


@pytest.mark.parametrize(
    ("credit", "problem"),
    [
        ([0.5], "sample 0 has 1 token_weight for 2"),
        ([0.5, float("nan")], r"token_weight\[1\] of sample 0 is nan"),
        ([1e39, 0.0], r"token_weight\[0\] of sample 0 is inf"),
    ],
)
def test_credit_that_cannot_be_is_named_and_not_sent(credit, problem):
    item = item_of(credit)
    for read in (lambda: MacroBatch.ingest([item], 8), lambda: encode_batch(SAWBatch([item]))):
        with pytest.raises(DataError, match=problem):
            read()
    with pytest.raises(EntryError, match=problem):
        encode_samples(SampleGroup("p", 0, [item]))


def test_columns_of_bad_names_and_types_are_refused():
    with pytest.raises(DataTypeError, match="token_weight must be a List"):
        SampleAttachments(token_columns={"token_weight": "half"})
    for name in ("weight", "a b"):
        item = SAWItem([5, 6], [1, 1], [0, 1], 1.0, {}, SampleAttachments(token_columns={name: [1.0]}))
        with pytest.raises(DataError, match=f'"{name}" cannot be added'):
            MacroBatch.ingest([item], 8)
        with pytest.raises(EntryError, match=f'"{name}" cannot be added'):
            encode_samples(SampleGroup("p", 0, [item]))


@given(st.lists(st.none() | st.lists(st.floats(-1e30, 1e30), min_size=2, max_size=2), min_size=1, max_size=4))
def test_columns_come_back_exactly(credit):
    plain = SAWItem([5, 6, 7], [1] * 3, [0, 1, 1], 1.0, {"rollout_id": "r"})
    items = [plain if each is None else item_of(each) for each in credit]
    sent = decode_samples(encode_samples(SampleGroup("p", 0, items))).items
    for again in (decode_batch(*encode_batch(SAWBatch(items), is_exact=True)).items, sent):
        columns = [item.attachments.token_columns for item in again]
        assert [each and {"token_weight": list(each["token_weight"])} for each in columns] == [
            {} if each is None else {"token_weight": each} for each in credit
        ]


def test_other_credit_is_another_batch():
    items = sorting_items(4)
    digests = {MacroBatch.ingest(each, 32).digest() for each in (items, with_credit(items, drawn), with_credit(items, constant))}
    assert len(digests) == 3
    state = ItemBatchSource(with_credit(items, drawn), batch_size=2, seed=0).state_dict()
    with pytest.raises(Exception, match="digest"):
        ItemBatchSource(items, batch_size=2, seed=0).load_state_dict(state)
