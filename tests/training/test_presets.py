"""Presets: what each one is made of, by the table of the API."""

import pytest
import torch
from loss_batches import Bigram, padded, rows

from ludic.training import (
    CISPOLoss,
    ClippedSurrogateLoss,
    CompositeLoss,
    ConstantCredit,
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    MaskedCausalLMCrossEntropyLoss,
    MonteCarloReturn,
    ReinforceBaselineLoss,
    ReinforceLoss,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
    algorithm as algorithm_module,
    make_cispo,
    make_grpo,
    make_gspo,
    make_reinforce,
    make_reinforce_baseline,
    make_scalerl,
    make_sft,
    presets,
)
from ludic.training.algorithm import validate_actor_logps
from ludic.training.loss import GMPOLoss, SAPOLoss, compute_token_logp
from ludic.training.presets import make_dr_grpo, make_gmpo, make_sapo
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWBatch, SAWItem

G = 4
PARTS = {
    "reinforce": (make_reinforce(), MonteCarloReturn(1.0), ReinforceLoss()),
    "reinforce_baseline": (
        make_reinforce_baseline(normalize_adv=True),
        MonteCarloReturn(1.0),
        ReinforceBaselineLoss(normalize=True),
    ),
    "grpo": (make_grpo(group_size=G), GroupNormalizedReturn(G, normalize_adv=True), TokenClippedSurrogateLoss(0.2, 0.27)),
    "dr_grpo": (make_dr_grpo(group_size=G), GroupNormalizedReturn(G, normalize_adv=False), TokenClippedSurrogateLoss(0.2, 0.27)),
    "gspo": (
        make_gspo(group_size=G),
        GroupNormalizedReturn(G, normalize_adv=True),
        ClippedSurrogateLoss(3e-4, 4e-4, length_normalize=True),
    ),
    "cispo": (make_cispo(group_size=G), GroupNormalizedReturn(G, normalize_adv=True), CISPOLoss(1e6, 0.2, length_normalize=True)),
    "sapo": (make_sapo(group_size=G), GroupNormalizedReturn(G, normalize_adv=True), SAPOLoss(1.0, 1.05)),
    "gmpo": (make_gmpo(group_size=G), GroupNormalizedReturn(G, normalize_adv=True), GMPOLoss(0.4, 0.4, length_normalize=True)),
    "scalerl": (make_scalerl(group_size=G), HybridNormalizedReturn(G), CISPOLoss(0.2, 0.28, length_normalize=True)),
    "sft": (make_sft(), ConstantCredit(1.0), MaskedCausalLMCrossEntropyLoss(length_normalize=False)),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_preset_is_made_of_the_documented_parts(name):
    algorithm, credit, loss = PARTS[name]
    assert algorithm.name == name
    assert algorithm.credit_assigner == credit
    assert algorithm.loss == loss


@pytest.mark.parametrize("name", PARTS)
def test_every_preset_can_be_imported_from_the_algorithm_module(name):
    assert getattr(algorithm_module, f"make_{name}") is getattr(presets, f"make_{name}")


def test_only_ratio_presets_check_log_probabilities():
    assert make_reinforce().preprocess is None
    assert make_sft().preprocess is None
    assert make_grpo(group_size=G).preprocess is validate_actor_logps


def sample(weight, group="g", logps=True):
    attached = SampleAttachments(ActorTokenLogps([-1.0]) if logps else None)
    return SAWItem([1, 2], [1, 1], [0, 1], weight, {"request_meta": {"group_id": group}}, attached)


def test_samples_that_are_dropped_need_no_log_probabilities():
    batch = SAWBatch([sample(0.0, logps=False), sample(1.0)])
    assert len(make_grpo(group_size=G, drop_zero_weight=True).preprocess(batch).items) == 1


def test_scalerl_drops_groups_without_variance_first():
    batch = SAWBatch([sample(2.0, "flat", logps=False), sample(2.0, "flat", logps=False), sample(1.0), sample(-1.0)])
    kept = make_scalerl(group_size=2).preprocess(batch)
    assert [s.weight for s in kept.items] == [1.0, -1.0]
    assert kept.meta["zvp_filter_frac"] == 0.5


@pytest.mark.parametrize("make", [make_cispo, make_scalerl])
def test_a_kl_coefficient_adds_a_term(make):
    assert isinstance(make(group_size=G).loss, CISPOLoss)
    loss = make(group_size=G, kl_coeff=0.1).loss
    assert isinstance(loss, CompositeLoss)
    assert [(term.name, term.weight) for term in loss.terms] == [("cispo", 1.0), ("kl", 1.0)]
    assert loss.terms[1].loss == TokenKLLoss(coeff=0.1)


@pytest.mark.parametrize("name", PARTS)
def test_every_preset_computes_a_loss_with_a_gradient(name):
    model, batch = Bigram(), padded(rows(4, seed=5))
    with torch.no_grad():  # on-policy, so that no clip acts
        logps = compute_token_logp(model(batch["input_ids"]), batch["input_ids"]) * batch["action_mask"][:, 1:]
    batch["actor_logps"] = torch.nn.functional.pad(logps, (1, 0))
    batch["old_logp_action"] = logps.sum(dim=1)
    loss, stats = PARTS[name][0].compute_loss(model, batch)
    loss.backward()
    assert model.table.grad.abs().max() > 0
    assert float(stats["loss"]) == pytest.approx(loss.item())
