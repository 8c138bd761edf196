"""Presets: the parts of each, as listed in the API documentation."""

import ast
import inspect
import re
import subprocess
import sys
from functools import partial
from inspect import signature
from pathlib import Path

import pytest
import torch
from loss_batches import Bigram, padded, rows

from ludic import training
from ludic.errors import ConfigError
from ludic.training import (
    BatchNormalizedReturn,
    CISPOLoss,
    ClippedSurrogateLoss,
    CompositeLoss,
    ConstantCredit,
    EntropyBonus,
    EpisodicReturn,
    GreedyBaselineReturn,
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    LossTerm,
    MaskedCausalLMCrossEntropyLoss,
    MonteCarloReturn,
    OverlongPenalty,
    PassAtKReturn,
    PerStepReward,
    ReferenceKLLoss,
    ReinforceBaselineLoss,
    ReinforceLoss,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
    algorithm as algorithm_module,
    make_cispo,
    make_dapo,
    make_grpo,
    make_gspo,
    make_opd,
    make_pass_at_k,
    make_ppo,
    make_reinforce,
    make_reinforce_baseline,
    make_reinforce_plus_plus,
    make_remax,
    make_rloo,
    make_scalerl,
    make_sft,
    presets,
)
from ludic.training.algorithm import validate_actor_logps
from ludic.training.loss import GMPOLoss, SAPOLoss, SharedContext, compute_token_logp
from ludic.training.presets import make_dr_grpo, make_gmpo, make_maxent_grpo, make_sapo
from ludic.training.presets.registry import REGISTRY
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
    "maxent_grpo": (make_maxent_grpo(group_size=G), EpisodicReturn(G), TokenClippedSurrogateLoss(0.2, 0.27)),
    "opd": (make_opd(), ConstantCredit(0.0), TokenClippedSurrogateLoss(0.2, 0.27)),
    "gspo": (
        make_gspo(group_size=G),
        GroupNormalizedReturn(G, normalize_adv=True),
        ClippedSurrogateLoss(3e-4, 4e-4, length_normalize=True),
    ),
    "cispo": (make_cispo(group_size=G), GroupNormalizedReturn(G, normalize_adv=True), CISPOLoss(1e6, 0.2, length_normalize=True)),
    "sapo": (make_sapo(group_size=G), GroupNormalizedReturn(G, normalize_adv=True), SAPOLoss(1.0, 1.05)),
    "gmpo": (make_gmpo(group_size=G), GroupNormalizedReturn(G, normalize_adv=True), GMPOLoss(0.4, 0.4, length_normalize=True)),
    "rloo": (make_rloo(group_size=G), GroupNormalizedReturn(G, leave_one_out=True), TokenClippedSurrogateLoss(0.2, 0.2)),
    "remax": (make_remax(group_size=G), GreedyBaselineReturn(G + 1), TokenClippedSurrogateLoss(0.2, 0.2)),
    "pass_at_k": (
        make_pass_at_k(group_size=G, k=2),
        PassAtKReturn(G, 2),
        TokenClippedSurrogateLoss(0.2, 0.28, normalizer="tokens"),
    ),
    "dapo": (
        make_dapo(group_size=G, max_completion_tokens=100),
        OverlongPenalty(GroupNormalizedReturn(G, normalize_adv=True), max_tokens=100, buffer_tokens=20),
        TokenClippedSurrogateLoss(0.2, 0.28, normalizer="tokens"),
    ),
    "reinforce_plus_plus": (
        make_reinforce_plus_plus(),
        BatchNormalizedReturn(),
        TokenClippedSurrogateLoss(0.2, 0.2, normalizer="tokens"),
    ),
    "ppo": (make_ppo(), PerStepReward(), TokenClippedSurrogateLoss(0.2, 0.2, normalizer="tokens")),
    "scalerl": (make_scalerl(group_size=G), HybridNormalizedReturn(G), CISPOLoss(0.2, 0.28, length_normalize=True)),
    "sft": (make_sft(), ConstantCredit(1.0), MaskedCausalLMCrossEntropyLoss(length_normalize=False)),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_preset_has_the_documented_parts(name):
    algorithm, credit, loss = PARTS[name]
    assert algorithm.name == name
    assert algorithm.credit_assigner == credit
    assert algorithm.loss == loss


def test_this_table_has_every_preset_of_the_registry():
    assert set(presets.REGISTRY) == set(PARTS) - {"sft"}
    assert all(PARTS[name][0].name == name for name in presets.REGISTRY)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_is_registered_with_its_algorithms_name_and_paper(name):
    preset = presets.PRESETS[name]
    assert inspect.signature(preset.make).parameters["name"].default == name
    assert preset.paper in preset.make.__doc__


def test_the_stubs_import_exactly_the_presets_from_their_modules():
    homes = {preset.function: preset.module for preset in presets.PRESETS.values()}
    assert {name: home for name, home in stub_imports(presets).items() if name.startswith("make_")} == homes
    facade = {name for name in stub_imports(training) if name.startswith("make_") and hasattr(presets, name)}
    assert facade == set(homes)


def stub_imports(package):
    tree = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    return {alias.name: node.module for node in tree.body for alias in node.names}


def test_reading_the_registry_does_not_import_torch():
    code = "import sys; from ludic.training.presets.registry import REGISTRY; print(len(REGISTRY), 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(len(presets.REGISTRY)), "False"]


@pytest.mark.parametrize("name", [name for name in presets.__all__ if name.startswith("make_")])
def test_every_preset_can_be_imported_from_the_package_and_the_algorithm_module(name):
    assert getattr(algorithm_module, name) is getattr(training, name) is getattr(presets, name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *[
            (partial(make, group_size=1), r"group_size \(1\) .*at least 2")
            for make in (make_rloo, make_grpo, make_dr_grpo, make_dapo, make_gspo, make_sapo, make_gmpo, make_cispo, make_scalerl)
        ],
        (lambda: make_grpo(group_size=0), "group_size must be positive, got 0"),
        (lambda: make_remax(group_size=0), r"group_size \(0\) must be at least 1"),
        (lambda: make_pass_at_k(group_size=4, k=5), r"k \(5\) must be"),
        (lambda: make_reinforce_plus_plus(group_baseline=True), "needs group_size"),
        (lambda: make_dapo(group_size=G, overlong_buffer_tokens=5), "counts back from max_completion_tokens"),
        (lambda: make_dapo(group_size=G, max_completion_tokens=4, overlong_buffer_tokens=5), r"buffer_tokens \(5\) must be"),
    ],
)
def test_invalid_settings_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_reinforce_plus_plus_with_a_group_baseline_subtracts_the_group_mean():
    assert make_reinforce_plus_plus(group_size=G, group_baseline=True).credit_assigner == HybridNormalizedReturn(G)


def test_dapo_without_a_length_limit_has_no_length_penalty():
    assert make_dapo(group_size=G).credit_assigner == GroupNormalizedReturn(G, normalize_adv=True)


def test_only_ratio_presets_check_log_probabilities():
    assert make_reinforce().preprocess is None
    assert make_sft().preprocess is None
    assert make_grpo(group_size=G).preprocess is validate_actor_logps


def sample(weight, group="g", logps=True):
    attached = SampleAttachments(ActorTokenLogps([-1.0]) if logps else None)
    return SAWItem([1, 2], [1, 1], [0, 1], weight, {"request_meta": {"group_id": group}}, attached)


def test_dropped_samples_need_no_log_probabilities():
    batch = SAWBatch([sample(0.0, logps=False), sample(1.0)])
    assert len(make_grpo(group_size=G, drop_zero_weight=True).preprocess(batch).items) == 1


@pytest.mark.parametrize("make", [make_scalerl, make_dapo])
def test_groups_without_variance_are_dropped_first(make):
    batch = SAWBatch([sample(2.0, "flat", logps=False), sample(2.0, "flat", logps=False), sample(1.0), sample(-1.0)])
    filtered = make(group_size=2).preprocess(batch)
    assert [s.weight for s in filtered.items] == [1.0, -1.0]
    assert filtered.meta["zvp_filter_frac"] == 0.5


@pytest.mark.parametrize("make", [make_cispo, make_scalerl])
def test_a_kl_coefficient_adds_a_term(make):
    assert isinstance(make(group_size=G).loss, CISPOLoss)
    loss = make(group_size=G, kl_coeff=0.1).loss
    assert isinstance(loss, CompositeLoss)
    assert [(term.name, term.weight) for term in loss.terms] == [("cispo", 1.0), ("kl", 1.0)]
    assert loss.terms[1].loss == TokenKLLoss(coeff=0.1)
    assert make(group_size=G, kl_coeff=0.1, kl_estimator="k3").loss.terms[1].loss == TokenKLLoss(coeff=0.1, estimator="k3")


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


def test_maxent_grpo_adds_the_terms_that_it_is_asked_for():
    plain = make_maxent_grpo(group_size=G)
    assert not plain.reads_reference
    assert sorted(plain.coefficients) == ["tau"]
    full = make_maxent_grpo(group_size=G, beta=0.2, form="likelihood", clip_coeff=0.5, clip_baseline=0.1, kl_level="sequence")
    assert [term.name for term in full.loss.terms] == ["policy", "clip", "reference_kl"]
    assert full.reads_reference
    assert full.loss.terms[2].loss.coeff is full.coefficients["beta"] is full.batch_credit.beta
    assert full.batch_credit.tau is full.coefficients["tau"]
    assert full.loss.terms[1].loss.baseline == 0.1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"form": "listwise"}, "form"),
        ({"clip_coeff": 0.5}, "clip_coeff"),
        ({"form": "likelihood", "clip_coeff": -1.0}, "clip_coeff"),
        ({"form": "likelihood", "normalizer": "tokens"}, "normalizer"),
        ({"group_size": 1}, "at least 2"),
        ({"q_epsilon": 0.3}, "q_epsilon"),
        ({"tau": 0.0}, "both 0"),
        ({"beta": -0.1}, "must be"),
    ],
)
def test_wrong_settings_of_maxent_grpo_are_config_errors(changes, words):
    with pytest.raises(ConfigError, match=words):
        make_maxent_grpo(**{"group_size": G, **changes})


@pytest.mark.parametrize("make", [make_grpo, make_dr_grpo, make_cispo, make_scalerl])
def test_a_reference_kl_is_one_more_term_whose_coefficient_controllers_change(make):
    plain, penalised = make(group_size=G), make(group_size=G, reference_kl=0.3)
    assert (plain.reads_reference, penalised.reads_reference) == (False, True)
    assert plain.coefficients == {}
    kl = penalised.loss.terms[-1].loss
    assert kl.coeff is penalised.coefficients["beta"]
    assert float(kl.coeff) == 0.3
    with pytest.raises(ConfigError, match="reference_kl"):
        make(group_size=G, reference_kl=-0.1)


MEANS = {
    "sum": ({"length_normalize": False}, lambda x, mask: (x * mask).sum(1).mean()),
    "samples": ({"length_normalize": True}, lambda x, mask: ((x * mask).sum(1) / mask.sum(1)).mean()),
    "tokens": ({"length_normalize": False, "normalizer": "tokens"}, lambda x, mask: (x * mask).sum() / mask.sum()),
}
"""Arguments of a preset -> the mean over tokens: those of TRL's `loss_type` dr_grpo (but for a
constant), grpo and dapo."""


def penalised_presets():
    """Every preset that takes a penalty, with each mean and each level that it has."""
    for name, preset in REGISTRY.items():
        accepted = signature(preset.make).parameters
        for penalty in sorted({"reference_kl", "beta", "kl_coeff"} & set(accepted)):
            levels = ("token", "sequence") if "kl_level" in accepted and penalty != "kl_coeff" else ("token",)
            for mean, (arguments, _) in MEANS.items():
                for level in levels:
                    if set(arguments) <= set(accepted):
                        more = {"kl_level": level} if len(levels) > 1 else {}
                        yield pytest.param(
                            name, {penalty: 0.04, **arguments, **more}, mean, level, id=f"{name}-{penalty}-{mean}-{level}"
                        )


def repeated(tokens, dtype=torch.float64):
    """Samples of `tokens`, half and a quarter as many, repeats of one pattern: the
    logits, and a batch with the columns of every credit."""
    generator = torch.Generator().manual_seed(3)
    once = {"ids": torch.randint(0, 5, (3, 4), generator=generator)}
    once |= {name: -0.1 - torch.rand(3, 4, dtype=dtype, generator=generator) for name in ("actor_logps", "reference_logps")}
    once["logits"] = torch.randn(3, 4, 5, dtype=dtype, generator=generator)
    mask = (torch.arange(tokens) < torch.tensor([[tokens], [tokens // 2], [tokens // 4]])).to(dtype)
    whole = {name: torch.cat([values[:, :1], *[values] * (tokens // 4)], dim=1) for name, values in once.items()}
    logits = torch.cat([once["logits"]] * (tokens // 4) + [once["logits"][:, :1]], dim=1).requires_grad_()
    action_mask = torch.cat([torch.zeros(3, 1, dtype=dtype), mask], dim=1)
    batch = {"input_ids": whole["ids"], "attention_mask": torch.ones_like(whole["ids"]), "action_mask": action_mask}
    batch |= {name: whole[name] * action_mask for name in ("actor_logps", "reference_logps")}
    return logits, {**batch, "weight": torch.tensor([1.0, -0.5, 0.7], dtype=dtype)}


@pytest.mark.parametrize(("name", "arguments", "mean", "level"), list(penalised_presets()))
def test_a_penalty_has_the_mean_of_its_policy_loss(name, arguments, mean, level):
    """The ratio of their gradients does not depend on the length; and both are one mean, as in TRL
    and in eq. 3 of GRPO's paper."""
    policy, penalty = (term.loss for term in REGISTRY[name].make(group_size=G, **arguments).loss.terms)
    ratios = []
    for tokens in (16, 128, 1024):
        logits, batch = repeated(tokens)
        norms = [torch.autograd.grad(loss.compute(logits, batch)[0], logits)[0].norm() for loss in (penalty, policy)]
        ratios.append(float(norms[0] / norms[1]))
    assert ratios == pytest.approx([ratios[0]] * 3, rel=1e-6)

    logits, batch = repeated(16)
    shared = SharedContext(logits, batch)
    other = shared.reference_logp if isinstance(penalty, ReferenceKLLoss) else shared.sampler_logp
    d = (shared.token_logp - other) * shared.token_mask
    if level == "sequence":
        d = (d.sum(1) / shared.token_mask.sum(1))[:, None].expand_as(d)
    kl = d if penalty.estimator == "k1" else (-d).exp() - 1 + d
    ratio, weight = shared.ratio, shared.weight[:, None]
    if isinstance(policy, CISPOLoss):
        token = -ratio.detach().clamp(1 - policy.clip_eps_low, 1 + policy.clip_eps_high) * weight * shared.token_logp
    else:
        token = -torch.minimum(ratio * weight, ratio.clamp(1 - policy.clip_eps_low, 1 + policy.clip_eps_high) * weight)
    expected = torch.autograd.grad(MEANS[mean][1](token + 0.04 * kl, shared.token_mask), logits)[0]
    actual = torch.autograd.grad(policy.compute(logits, batch)[0] + penalty.compute(logits, batch)[0], logits)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def test_a_composite_of_a_sum_and_a_mean_is_named(caplog):
    surrogate = TokenClippedSurrogateLoss()
    CompositeLoss([LossTerm("pg", surrogate), LossTerm("h", EntropyBonus(0.1, normalizer="samples"))])
    CompositeLoss([LossTerm("pg", TokenClippedSurrogateLoss(normalizer="tokens")), LossTerm("h", EntropyBonus(0.1))])
    assert not caplog.records
    CompositeLoss([LossTerm("pg", surrogate), LossTerm("h", EntropyBonus(0.1))])
    assert re.search("pg is a sum .*, of h a mean", caplog.text)
