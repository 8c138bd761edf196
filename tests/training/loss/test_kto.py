"""Kahneman-Tversky optimization: numbers by hand, and no dependence on the split."""

import itertools
import math

import pytest
import torch
from hypothesis import given, strategies as st
from loss_batches import Bigram, padded, rows

from ludic.errors import ConfigError, DataKeyError
from ludic.training import BatchTotals, KTOLoss, RLAlgorithm
from ludic.training.credit_assignment import ConstantCredit


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def answers(ratios, roles, kl, labels=None):
    """One answer of one token for each log-ratio to a reference of log-probability -2."""
    logits = torch.zeros(len(ratios), 2, 2, dtype=torch.float64)
    for row, ratio in enumerate(ratios):
        p = math.exp(ratio - 2.0)
        logits[row, 0] = torch.tensor([math.log(1 - p), math.log(p)])
    ids, mask = torch.ones(len(ratios), 2, dtype=torch.long), torch.tensor([[0.0, 1.0]]).repeat(len(ratios), 1)
    meta = {"role": roles, "label": labels or [1.0] * len(ratios)}
    batch = {"input_ids": ids, "attention_mask": ids, "action_mask": mask, "weight": torch.ones(len(ratios)), "meta": meta}
    return logits.requires_grad_(), {**batch, "reference_logps": -2.0 * mask, "kl": torch.full((len(ratios),), kl)}


def test_the_loss_by_hand():
    logits, batch = answers([1.0, -0.5, 0.25], ["chosen", "rejected", "chosen"], kl=0.5)
    loss, stats = KTOLoss(2.0, desirable_weight=1.5, undesirable_weight=0.5).compute(logits, batch)
    # 1 - sigma(2 (1 - 0.5)) = 0.268941, 1 - sigma(2 (0.5 + 0.5)) = 0.119203,
    # 1 - sigma(2 (0.25 - 0.5)) = 0.622459
    assert loss.item() == pytest.approx((1.5 * 0.268941 + 0.5 * 0.119203 + 1.5 * 0.622459) / 3, abs=1e-6)
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(
        {
            "loss": loss.item(),
            "kl": 0.5,
            "rewards/accuracies": 2 / 3,  # the third is desirable and below the KL divergence
            "rewards/chosen": 2 * (1.0 + 0.25) / 2,
            "rewards/rejected": -1.0,
            "logps/chosen": (-1.0 - 1.75) / 2,
            "logps/rejected": -2.5,
            "num_chosen": 2.0,
            "num_rejected": 1.0,
        },
        abs=1e-6,
    )


def test_the_label_of_a_pair_divides_each_answer_between_both_kinds():
    logits, batch = answers([1.0, -0.5], ["chosen", "rejected"], kl=0.0, labels=[0.75, 0.75])
    loss, _ = KTOLoss(1.0).compute(logits, batch)
    first, second = (0.75 * sigmoid(-r) + 0.25 * sigmoid(r) for r in (1.0, 0.5))  # the second is the rejected one
    assert loss.item() == pytest.approx((first + second) / 2, abs=1e-6)


def test_a_row_without_actions_stands_for_no_sample():
    logits, batch = answers([1.0], ["chosen"], kl=0.5)
    batch["action_mask"] = torch.zeros(1, 2)
    loss, stats = KTOLoss().compute(logits, batch)
    loss.backward()
    assert (loss.item(), stats["num_chosen"].item(), logits.grad.abs().max().item()) == (0.0, 0.0, 0.0)


@given(
    count=st.integers(1, 8),
    seed=st.integers(0, 1000),
    kl=st.sampled_from([0.0, 0.7]),
    cuts=st.sets(st.integers(1, 7)),
    weight=st.sampled_from([1.0, 1.5]),
)
def test_value_and_gradient_are_those_of_the_oracle_for_any_split(count, seed, kl, cuts, weight):
    samples = rows(count, seed=seed)
    roles = ["chosen" if (seed >> row) & 1 else "rejected" for row in range(count)]
    slow = Bigram()
    table, losses = slow.table.double(), []
    for sample, role in zip(samples, roles, strict=True):
        ids, taken = sample["input_ids"], [t for t in range(1, len(sample["input_ids"])) if sample["action_mask"][t]]
        logps = (table[ids[t - 1]].log_softmax(0)[ids[t]] - float(sample["actor_logps"][t]) for t in taken)
        z = 0.3 * (sum(logps, start=table.sum() * 0) - kl)
        losses.append((weight * torch.sigmoid(-z) if role == "chosen" else torch.sigmoid(z)) if taken else table.sum() * 0)
    expected = torch.stack(losses).mean()
    expected.backward()
    model, algorithm = Bigram(), RLAlgorithm("kto", ConstantCredit(1.0), KTOLoss(0.3, weight))
    totals, value = BatchTotals(float(count), 1.0, 0.0, 0.0), 0.0
    bounds = [0, *sorted(cut for cut in cuts if cut < count), count]
    for first, last in itertools.pairwise(bounds):
        batch = padded(samples[first:last])
        meta = {"role": roles[first:last], "label": [1.0] * (last - first)}
        extra = {"reference_logps": batch["actor_logps"], "kl": torch.full((last - first,), kl), "meta": meta}
        loss, _ = algorithm.compute_loss(model, {**batch, **extra}, totals=totals)
        loss.backward()
        value += loss.item()
    assert value == pytest.approx(expected.item(), abs=2e-6)
    torch.testing.assert_close(model.table.grad, slow.table.grad, atol=2e-6, rtol=0)


def test_wrong_settings_and_a_batch_without_the_kl_divergence_are_refused():
    with pytest.raises(ConfigError, match=r"beta \(0\)"):
        KTOLoss(0)
    with pytest.raises(ConfigError, match=r"desirable_weight \(-1\) must be at least 0"):
        KTOLoss(desirable_weight=-1)
    logits, batch = answers([1.0], ["chosen"], kl=0.5)
    del batch["kl"]
    with pytest.raises(DataKeyError, match=r"no kl.*DPOTrainer"):
        KTOLoss().compute(logits, batch)
