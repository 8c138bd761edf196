"""Presets: the parts of each, as listed in the API documentation."""

import ast
import inspect
import subprocess
import sys
from functools import partial
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
    EpisodicReturn,
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    MaskedCausalLMCrossEntropyLoss,
    MonteCarloReturn,
    OverlongPenalty,
    ReinforceBaselineLoss,
    ReinforceLoss,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
    algorithm as algorithm_module,
    make_cispo,
    make_dapo,
    make_grpo,
    make_gspo,
    make_reinforce,
    make_reinforce_baseline,
    make_reinforce_plus_plus,
    make_rloo,
    make_scalerl,
    make_sft,
    presets,
)
from ludic.training.algorithm import validate_actor_logps
from ludic.training.loss import GMPOLoss, SAPOLoss, compute_token_logp
from ludic.training.presets import make_dr_grpo, make_gmpo, make_maxent_grpo, make_sapo
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
    "gspo": (
        make_gspo(group_size=G),
        GroupNormalizedReturn(G, normalize_adv=True),
        ClippedSurrogateLoss(3e-4, 4e-4, length_normalize=True),
    ),
    "cispo": (make_cispo(group_size=G), GroupNormalizedReturn(G, normalize_adv=True), CISPOLoss(1e6, 0.2, length_normalize=True)),
    "sapo": (make_sapo(group_size=G), GroupNormalizedReturn(G, normalize_adv=True), SAPOLoss(1.0, 1.05)),
    "gmpo": (make_gmpo(group_size=G), GroupNormalizedReturn(G, normalize_adv=True), GMPOLoss(0.4, 0.4, length_normalize=True)),
    "rloo": (make_rloo(group_size=G), GroupNormalizedReturn(G, leave_one_out=True), TokenClippedSurrogateLoss(0.2, 0.2)),
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
            (partial(make, group_size=1), r"group_size \(1\) must be at least 2: an answer is compared with the other answers")
            for make in (make_rloo, make_grpo, make_dr_grpo, make_dapo, make_gspo, make_sapo, make_gmpo, make_cispo, make_scalerl)
        ],
        (lambda: make_grpo(group_size=0), "group_size must be positive"),
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
