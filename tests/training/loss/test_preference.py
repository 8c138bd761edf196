"""The Bradley-Terry loss by hand, and how a batch identifies its pairs."""

import logging
import math

import pytest
import torch
from loss_batches import Bigram, padded, rows
from torch import nn

from ludic.errors import ConfigError, DataError
from ludic.training import BatchTotals, BradleyTerryLoss, CompositeLoss, LossTerm, RLAlgorithm, make_bradley_terry
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import SharedContext, scaled_loss


def batch_of(scores, roles=None, ids=None, labels=None):
    """Logits [B] that require a gradient, and a batch of B samples, alternately chosen and rejected
    by default."""
    count = len(scores)
    meta = {
        "pair_id": ids or [index // 2 for index in range(count)],
        "role": roles or ["chosen", "rejected"] * (count // 2),
        "label": labels or [1.0] * count,
    }
    zeros = torch.zeros(count, 2)
    batch = {"input_ids": zeros.long(), "attention_mask": zeros.long(), "action_mask": zeros, "weight": zeros[:, 0], "meta": meta}
    return torch.tensor(scores, requires_grad=True), batch


def sigma(z):
    return 1 / (1 + math.exp(-z))


def test_the_loss_is_minus_the_log_probability_of_the_preference():
    logits, batch = batch_of([1.0, 0.0, 0.5, 2.5])
    loss, stats = BradleyTerryLoss(beta=2.0).compute(logits, batch)
    # z = 2 (1 - 0) = 2 and 2 (0.5 - 2.5) = -4: softplus(-2) = 0.126928, softplus(4) = 4.018150
    assert loss.item() == pytest.approx((0.126928 + 4.018150) / 2, abs=1e-5)
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(
        {"loss": loss.item(), "accuracy": 0.5, "chosen_score": 0.75, "rejected_score": 1.25, "margin": -1.0, "num_pairs": 2.0}
    )
    loss.backward()
    # d/ds_c = -beta sigma(-z) / P
    expected = [-sigma(-2.0), sigma(-2.0), -sigma(4.0), sigma(4.0)]
    torch.testing.assert_close(logits.grad, torch.tensor(expected))


@pytest.mark.parametrize(("label", "eps", "smoothed"), [(1.0, 0.1, 0.95), (0.0, 0.1, 0.05), (0.5, 0.3, 0.5), (0.75, 0.0, 0.75)])
def test_labels_are_smoothed_towards_one_half(label, eps, smoothed):
    logits, batch = batch_of([1.5, 0.5], labels=[label, label])
    loss, stats = BradleyTerryLoss(label_smoothing=eps).compute(logits, batch)
    # y (1 - eps) + eps / 2; softplus(-1) = 0.313262, softplus(1) = 1.313262
    assert loss.item() == pytest.approx(smoothed * 0.313262 + (1 - smoothed) * 1.313262, abs=1e-5)
    assert stats["accuracy"].item() == float(smoothed > 0.5)


@pytest.mark.parametrize("label", [0.0, 0.5, 1.0])
def test_a_tie_counts_as_wrong_for_every_label(label):
    logits, batch = batch_of([0.5, 0.5], labels=[label, label])
    assert BradleyTerryLoss().compute(logits, batch)[1]["accuracy"].item() == 0.0


@pytest.mark.parametrize(("kind", "norm"), [("l2", 5.0), ("l1", 7.0)])
def test_the_norm_of_the_differences_is_over_the_batch_and_not_a_mean(kind, norm):
    logits, batch = batch_of([3.0, 0.0, 1.0, 5.0])  # differences 3 and -4
    plain, _ = BradleyTerryLoss().compute(logits, batch)
    loss, _ = BradleyTerryLoss(regularization_lambda=0.1, regularization_type=kind).compute(logits, batch)
    assert (loss - plain).item() == pytest.approx(0.1 * norm, abs=1e-6)
    (loss - plain).backward()
    # d|d|_2 = d / |d|, d|d|_1 = sign d
    unit = [0.6, -0.8] if kind == "l2" else [1.0, -1.0]
    torch.testing.assert_close(logits.grad, 0.1 * torch.tensor([unit[0], -unit[0], unit[1], -unit[1]]), atol=1e-6, rtol=0)


def test_equal_scores_have_norm_zero_and_a_finite_gradient():
    logits, batch = batch_of([2.0, 2.0])
    loss, _ = BradleyTerryLoss(regularization_lambda=1.0).compute(logits, batch)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    torch.testing.assert_close(logits.grad, torch.tensor([-0.5, 0.5]))


def test_scores_can_be_regularised():
    logits, batch = batch_of([3.0, 1.0, 1.0, 2.0])
    plain, _ = BradleyTerryLoss().compute(logits, batch)
    loss, stats = BradleyTerryLoss(score_regularization_lambda=0.1).compute(logits, batch)
    # (9 + 1) / 2 + (1 + 4) / 2 = 7.5
    assert (loss - plain).item() == pytest.approx(0.75, abs=1e-6)
    assert stats["score_reg"].item() == pytest.approx(0.75)
    centring = BradleyTerryLoss(score_regularization_lambda=0.1, score_regularization_type="squared_sum")
    loss, stats = centring.compute(logits, batch)
    # ((3 + 1)^2 + (1 + 2)^2) / 2 = 12.5, TRL's center_rewards_coefficient
    assert (loss - plain).item() == pytest.approx(1.25, abs=1e-6)
    assert stats["score_reg"].item() == pytest.approx(1.25)


def test_centring_a_pair_leaves_its_margin_free():
    plain, batch = batch_of([2.0, -2.0])
    BradleyTerryLoss().compute(plain, batch)[0].backward()
    centred, batch = batch_of([2.0, -2.0])
    BradleyTerryLoss(score_regularization_lambda=1.0, score_regularization_type="squared_sum").compute(centred, batch)[
        0
    ].backward()
    torch.testing.assert_close(centred.grad, plain.grad)


def test_pairs_are_matched_by_id_in_any_order():
    logits, batch = batch_of([0.0, 2.5, 1.0, 0.5], roles=["rejected", "rejected", "chosen", "chosen"], ids=["a", "b", "a", "b"])
    loss, stats = BradleyTerryLoss(beta=2.0).compute(logits, batch)
    in_order, _ = BradleyTerryLoss(beta=2.0).compute(*batch_of([1.0, 0.0, 0.5, 2.5]))
    assert loss.item() == pytest.approx(in_order.item())
    assert stats["chosen_score"].item() == 0.75


def test_samples_without_their_counterpart_are_ignored():
    logits, batch = batch_of([1.0, 9.0, 0.0], roles=["chosen", "rejected", "rejected"], ids=["a", "b", "a"])
    loss, stats = BradleyTerryLoss().compute(logits, batch)
    assert loss.item() == pytest.approx(-math.log(sigma(1.0)))
    assert stats["num_pairs"].item() == 1


@pytest.mark.parametrize("settings", [{}, {"regularization_lambda": 1.0}, {"score_regularization_lambda": 1.0}])
def test_without_a_pair_the_loss_is_zero_with_zero_gradient_and_all_statistics(settings):
    logits, batch = batch_of([1.0, 2.0], ids=["a", "b"])
    loss, stats = BradleyTerryLoss(**settings).compute(logits, batch)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.tolist() == [0.0, 0.0]
    _, usual = BradleyTerryLoss(**settings).compute(*batch_of([1.0, 2.0]))
    assert stats.keys() == usual.keys()
    assert set(stats.values()) == {0.0} or all(value.item() == 0 for value in stats.values())


def test_the_last_of_two_samples_with_the_same_role_counts(caplog):
    logits, batch = batch_of([9.0, 1.0, 0.0], roles=["chosen", "chosen", "rejected"], ids=["a", "a", "a"])
    with caplog.at_level(logging.WARNING):
        loss, _ = BradleyTerryLoss().compute(logits, batch)
    assert loss.item() == pytest.approx(-math.log(sigma(1.0)))
    assert "two chosen samples" in caplog.text


def test_scores_can_be_action_log_probabilities():
    model, samples = Bigram(), rows(4, seed=2)
    batch = {**padded(samples), "meta": batch_of([0.0] * 4)[1]["meta"]}
    loss, stats = BradleyTerryLoss(score_type="logprob").compute(model(batch["input_ids"]), batch)
    logp = torch.log_softmax(model.table, dim=-1)
    scores = [
        sum(logp[s["input_ids"][t - 1], s["input_ids"][t]].item() for t in range(1, len(s["input_ids"])) if s["action_mask"][t])
        for s in samples
    ]
    expected = [-math.log(sigma(scores[0] - scores[1])), -math.log(sigma(scores[2] - scores[3]))]
    assert loss.item() == pytest.approx(sum(expected) / 2, rel=1e-5)
    assert stats["chosen_score"].item() == pytest.approx((scores[0] + scores[2]) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pair_id": ["a"]}, r"meta\['pair_id'\] .*1 entries .*2 samples"),
        ({"label": [1.0, 0.0]}, r"pair 0 has conflicting labels \[0.0, 1.0\]"),
        ({"role": ["chosen", "worse"]}, r"role of sample 1 \('worse'\)"),
    ],
)
def test_wrong_metadata_is_refused(change, message):
    logits, batch = batch_of([1.0, 0.0])
    with pytest.raises(DataError, match=message):
        BradleyTerryLoss().compute(logits, {**batch, "meta": {**batch["meta"], **change}})


def test_missing_metadata_and_logits_that_are_not_scores_are_refused():
    logits, batch = batch_of([1.0, 0.0])
    with pytest.raises(DataError, match=r"pair_id.* 0 entries .*collate_preference_items"):
        BradleyTerryLoss().compute(logits, {name: value for name, value in batch.items() if name != "meta"})
    with pytest.raises(DataError, match=r"\[2\] or \[2, 1\], got \(2, 3\)"):
        BradleyTerryLoss().compute(torch.zeros(2, 3), batch)


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.0},
        {"score_type": "logits"},
        {"regularization_lambda": -1.0},
        {"score_regularization_lambda": -1.0},
        {"regularization_type": "l3"},
        {"score_regularization_type": "sums"},
        {"label_smoothing": 1.5},
    ],
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        BradleyTerryLoss(**settings)


def test_half_precision_scores_are_compared_in_float32():
    logits, batch = batch_of([1.0, 0.0])
    loss, _ = BradleyTerryLoss().compute(logits.to(torch.bfloat16), batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(0.313262, abs=1e-6)


def test_a_micro_batch_needs_totals_for_the_norm_of_all_pairs():
    logits, batch = batch_of([1.0, 0.0])
    totals = BatchTotals(num_samples=4, num_tokens=4, weight_mean=0, weight_std=0, num_pairs=2)
    loss = BradleyTerryLoss(regularization_lambda=0.1)
    with pytest.raises(ConfigError, match=r"l2 norm needs .* all 2 pairs, not 1; set regularization_type='l1'"):
        scaled_loss(loss, logits, batch, SharedContext(logits, batch, totals=totals))


def test_the_first_pass_of_a_composite_measures_every_term():
    logits, batch = batch_of([3.0, 0.0, 1.0, 5.0])
    composite = CompositeLoss(
        [LossTerm("bt", BradleyTerryLoss(regularization_lambda=0.1)), LossTerm("again", BradleyTerryLoss())]
    )
    assert composite.needs_first_pass
    assert composite.first_pass(logits, batch)["squared_margins"].item() == 25.0
    assert not CompositeLoss([LossTerm("bt", BradleyTerryLoss())]).needs_first_pass


def test_the_preset_accepts_both_names_of_the_norm_coefficient():
    for name in ("lambda_regularization", "regularization_lambda"):
        algo = make_bradley_terry(beta=2.0, label_smoothing=0.05, regularization_type="l1", **{name: 0.01})
        assert algo.loss == BradleyTerryLoss(2.0, "reward", 0.01, "l1", 0.05)
        assert algo.name == "bradley_terry"
        assert algo.preprocess is None
        assert algo.credit_assigner == ConstantCredit(1.0)
    with pytest.raises(ConfigError, match=r"lambda_regularization \(0.1\) or regularization_lambda \(0.2\), not both"):
        make_bradley_terry(lambda_regularization=0.1, regularization_lambda=0.2)


def test_a_model_that_returns_a_tensor_can_be_a_reward_model():
    class LastToken(nn.Module):
        def forward(self, input_ids, attention_mask=None):
            return input_ids[:, -1:].float()

    _, batch = batch_of([0.0, 0.0])
    batch["input_ids"] = torch.tensor([[0, 1], [0, 0]])
    loss, _ = RLAlgorithm("test", ConstantCredit(), BradleyTerryLoss()).compute_loss(LastToken(), batch)
    assert loss.item() == pytest.approx(0.313262, abs=1e-6)
