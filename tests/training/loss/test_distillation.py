"""Divergences from a teacher's distributions, against an oracle in float64."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from loss_batches import Bigram, V, packed, padded, rows

from ludic.errors import ConfigError, DataKeyError
from ludic.training.loss import DistillationLoss, SharedContext
from ludic.training.loss.distillation import TEACHER_LOGITS

BATCH = padded(rows(6, seed=3))


def batch_with(teacher, batch=BATCH):
    return {**batch, TEACHER_LOGITS: teacher.table.detach()[batch["input_ids"]]}


def compute(model, teacher, *, batch=BATCH, temperature=1.0, **settings):
    whole = batch_with(teacher, batch)
    loss = DistillationLoss(**settings)
    return loss.compute(None, whole, shared=SharedContext(model(whole["input_ids"]), whole, temperature=temperature))[0]


def oracle(model, teacher, divergence, beta=0.5, temperature=1.0):
    """The mean over the action tokens of the sum over the vocabulary."""
    mask = BATCH["action_mask"][:, 1:].double()
    states = BATCH["input_ids"][:, :-1]
    q, p = ((each.table.detach().double() / temperature).softmax(dim=-1)[states] for each in (model, teacher))
    m = beta * p + (1 - beta) * q
    terms = {
        "forward": p * (p / q).log(),
        "reverse": q * (q / p).log(),
        "jsd": beta * p * (p / m).log() + (1 - beta) * q * (q / m).log(),
    }
    return float((terms[divergence].sum(dim=-1) * mask).sum() / mask.sum())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_the_loss_is_the_sum_over_the_vocabulary(divergence, temperature):
    model, teacher = Bigram(0), Bigram(1)
    beta = {"jsd_beta": 0.3} if divergence == "jsd" else {}
    value = compute(model, teacher, divergence=divergence, temperature=temperature, **beta)
    expected = oracle(model, teacher, divergence, 0.3, temperature)
    assert expected > 0.05
    assert value.item() == pytest.approx(expected, abs=1e-6)


def test_two_tokens_by_hand():
    """pi = (1/2, 1/2), pi_T = (3/4, 1/4): 3/4 ln 3/2 + 1/4 ln 1/2, and reverse ln 2 / sqrt 3."""
    logits = torch.zeros(1, 2, 2, requires_grad=True)
    batch = {"input_ids": torch.zeros(1, 2, dtype=torch.long), "action_mask": torch.tensor([[0.0, 1.0]])}
    batch[TEACHER_LOGITS] = torch.tensor([[[math.log(3.0), 0.0]] * 2])
    values = [DistillationLoss(each).compute(logits, batch)[0].item() for each in ("forward", "reverse")]
    assert values == pytest.approx([0.75 * math.log(1.5) + 0.25 * math.log(0.5), math.log(2 / math.sqrt(3))], abs=1e-6)


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_top_k_with_the_whole_vocabulary_is_the_whole_divergence_with_its_gradient(divergence):
    found = []
    for top_k in (None, V):
        model = Bigram(0)
        value = compute(model, Bigram(1), divergence=divergence, top_k=top_k)
        value.backward()
        found.append((value.detach(), model.table.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][1].abs().max() > 1e-3


@given(seed=st.integers(0, 1000), divergence=st.sampled_from(["forward", "reverse", "jsd"]))
def test_more_tokens_never_make_the_divergence_smaller(seed, divergence):
    values = [compute(Bigram(seed), Bigram(seed + 1), divergence=divergence, top_k=k).item() for k in (1, 2, 5, V - 1, V)]
    assert values[0] >= 0
    assert all(less <= more + 1e-6 for less, more in pairwise(values))
    assert values[-1] - values[-2] == pytest.approx(0, abs=1e-6)  # V - 1 tokens and the last one as "any other"


@pytest.mark.parametrize("top_k", [None, 3])
def test_the_gradient_is_that_of_finite_differences(top_k):
    teacher = Bigram(1, torch.float64)
    batch = {name: value.double() if value.is_floating_point() else value for name, value in BATCH.items()}

    def loss_of(table):
        whole = batch_with(teacher, batch)
        shared = SharedContext(table[whole["input_ids"]], whole)
        return torch.stack(
            [DistillationLoss(each, top_k=top_k).compute_from(shared)[0] for each in ("forward", "reverse", "jsd")]
        )

    assert torch.autograd.gradcheck(loss_of, Bigram(0, torch.float64).table, atol=1e-5, fast_mode=True)


def test_a_batch_without_padding_has_the_same_loss():
    samples = rows(6, seed=3)
    model, teacher = Bigram(0), Bigram(1)
    values = [compute(model, teacher, batch=layout(samples)).item() for layout in (padded, packed)]
    assert values[0] == pytest.approx(values[1], abs=1e-6)


def test_the_tokens_of_the_smaller_vocabulary_count():
    """A teacher whose embedding is padded: its more columns change nothing."""
    model, teacher = Bigram(0), Bigram(1)
    batch = batch_with(teacher)
    wider = {**batch, TEACHER_LOGITS: torch.nn.functional.pad(batch[TEACHER_LOGITS], (0, 5), value=7.0)}
    plain, more = (DistillationLoss().compute(model(batch["input_ids"]), each)[0].item() for each in (batch, wider))
    assert plain == more


def test_bad_settings_and_a_batch_without_a_teacher_are_refused():
    for settings, message in (
        ({"divergence": "kl"}, r"divergence \('kl'\) must be"),
        ({"top_k": 0}, r"top_k \(0\) must be"),
        ({"jsd_beta": 1.0}, r"jsd_beta \(1.0\) must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            DistillationLoss(**settings)
    with pytest.raises(DataKeyError, match="no teacher_logits; set the teacher"):
        DistillationLoss().compute(Bigram()(BATCH["input_ids"]), BATCH)
