"""Metrics of preference scores: by hand, and compared with oracles that count one by one."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from sklearn import metrics as sklearn_metrics
from torchmetrics.functional import classification

from ludic.errors import ConfigError, DataError
from ludic.training import PreferenceMetrics
from ludic.training.classification_metrics import (
    calibration_bins,
    compute_margin_stats,
    compute_pairwise_accuracy,
    preference_loss,
    preference_probability,
)

SIX = ["pairwise_accuracy", "mean_margin", "margin_std", "negative_margin_rate", "roc_auc", "ece"]


def metrics_of(chosen, rejected, labels=None, **settings):
    metrics = PreferenceMetrics(**settings)
    metrics.update(chosen, rejected, labels)
    return metrics.compute()


def sigma(z):
    return 1 / (1 + math.exp(-z))


# --- by hand


def test_accuracy_counts_ties_as_wrong_and_reverses_with_the_label():
    # margins 1, -1, 0, -1, 1 with labels 1, 1, 1, 0, 0: right, wrong, tie, right, wrong
    found = metrics_of([1, 0, 0, 0, 1], [0, 1, 0, 1, 0], [1, 1, 1, 0, 0])
    assert found["pairwise_accuracy"] == pytest.approx(2 / 5)
    assert found["negative_margin_rate"] == pytest.approx(2 / 5)  # of 1, -1, 0, 1, -1: the last two reversed


def test_margins_by_hand():
    found = metrics_of([3.0, 1.0, 2.0], [1.0, 2.0, 2.0])  # 2, -1, 0
    assert found["mean_margin"] == pytest.approx(1 / 3)
    assert found["margin_std"] == pytest.approx(math.sqrt((25 / 9 + 16 / 9 + 1 / 9) / 3))
    assert found["margin_p50"] == 0.0
    assert found["margin_p25"] == -0.5
    assert found["margin_p95"] == pytest.approx(1.8)


def test_the_area_under_the_curve_by_hand():
    # chosen 3, 2 against rejected 1, 2: 3 > 1, 3 > 2, 2 > 1, 2 = 2: (3 + 1/2) / 4
    assert metrics_of([3.0, 2.0], [1.0, 2.0])["roc_auc"] == pytest.approx(0.875)


def test_soft_labels_by_hand():
    # y = 1, 0, 3/4: margins 2 (weight 1), 3 reversed to -3 (1), 4 (3/4) and -4 (1/4)
    found = metrics_of([2.0, 3.0, 4.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.75], thresholds=(2.5,), thresholds_on="responses")
    assert found["mean_margin"] == pytest.approx((2 - 3 + 3 - 1) / 3)
    assert found["margin_std"] == pytest.approx(math.sqrt((4 + 9 + 16) / 3 - (1 / 3) ** 2))
    assert found["negative_margin_rate"] == pytest.approx((1 + 0.25) / 3)
    # laid end to end: -4 to 1/4, -3 to 5/4, 2 to 9/4, 4 to 3; units: -4/4 - 9/4, -3/4 + 6/4, 2/4 +
    # 12/4
    assert found["margin_p50"] == pytest.approx(0.75)
    assert found["margin_p25"] == pytest.approx((-3.25 + 0.75) / 2)
    assert found["margin_p95"] == pytest.approx(0.1 * 0.75 + 0.9 * 3.5)
    # positives: 2 (1), 4 (3/4), 0 (0 + 1 + 1/4); negatives: 3 (1), 4 (1/4), 0 (1 + 0 + 3/4)
    won = 1 * 1.75 + 0.75 * (1.75 + 1 + 0.125) + 1.25 * 1.75 / 2
    assert found["roc_auc"] == pytest.approx(won / 9)
    assert (found["fpr@2.5"], found["fnr@2.5"], found["tpr@2.5"]) == pytest.approx((1.25 / 3, 2.25 / 3, 0.75 / 3))


def test_a_model_that_states_the_probability_of_its_labels_is_calibrated():
    margins, labels = [math.log(3), 0.0, -math.log(9)], [0.75, 0.5, 0.1]
    assert metrics_of(margins, [0.0] * 3, labels)["ece"] == pytest.approx(0.0, abs=1e-12)
    assert metrics_of(margins, [0.0] * 3, labels, both_orders=True)["ece"] == pytest.approx(0.0, abs=1e-12)


def test_calibration_by_hand():
    # p = sigma(0.5 * 2 ln 3) = 0.75 twice, sigma(0) = 0.5 once; bins of width 1/4: [0.5, 0.75) and
    # [0.75, 1]
    margin = 2 * math.log(3)
    found = metrics_of([margin, margin, 0.0], [0.0, 0.0, 0.0], [1, 0, 1], calibration_bins=4, beta=0.5)
    # |0.75 - 1/2| * 2/3 + |0.5 - 1| * 1/3
    assert found["ece"] == pytest.approx(0.25 * 2 / 3 + 0.5 / 3)


def test_with_one_order_and_hard_labels_a_model_cannot_appear_calibrated():
    """True probabilities of 0.8 and 80 of 100 preferences that agree: perfect calibration, which
    the labels alone do not show."""
    margin = math.log(4)
    chosen, rejected = [margin] * 80 + [0.0] * 20, [0.0] * 80 + [margin] * 20
    assert metrics_of(chosen, rejected)["ece"] == pytest.approx(0.8 * 0.2 + 0.2 * 0.8)
    assert metrics_of(chosen, rejected, both_orders=True)["ece"] == pytest.approx(0.0, abs=1e-12)
    # the same pairs, the higher score first, with labels that say which response was preferred
    labels = [1.0] * 80 + [0.0] * 20
    assert metrics_of([margin] * 100, [0.0] * 100, labels)["ece"] == pytest.approx(0.0, abs=1e-12)


def test_thresholds_on_the_probability_of_pairs_by_hand():
    # p = 0.75, 0.25, 0.5 with labels 1, 0, 0 and thresholds 0.5 (p > t), 0.2
    found = metrics_of([math.log(3), 0.0, 0.0], [0.0, math.log(3), 0.0], [1, 0, 0], thresholds=[0.5, 0.2])
    assert {key: value for key, value in found.items() if "@" in key} == pytest.approx(
        {"fpr@0.5": 0.0, "fnr@0.5": 0.0, "fpr@0.2": 1.0, "fnr@0.2": 0.0}
    )
    one_class = metrics_of([1.0], [0.0], [1.0])
    assert (one_class["fpr@0.5"], one_class["fnr@0.5"]) == (0.0, 0.0)


def test_thresholds_on_the_scores_of_responses_by_hand():
    found = metrics_of([2.0, 0.5, 1.0, 0.0], [0.6, 0.5, -1.0, 3.0], thresholds=(0.5,), thresholds_on="responses")
    # chosen > 0.5: 2 of 4; rejected > 0.5: 2 of 4 (0.6 and 3.0)
    assert {key: value for key, value in found.items() if "@" in key} == {"fpr@0.5": 0.5, "fnr@0.5": 0.5, "tpr@0.5": 0.5}


def test_without_thresholds_no_rates_are_reported():
    assert not [key for key in metrics_of([1.0], [0.0], thresholds=None) if "@" in key]


def test_without_a_pair_the_six_metrics_are_zero():
    metrics = PreferenceMetrics()
    assert metrics.compute() == dict.fromkeys(SIX, 0.0)
    metrics.update([1.0], [0.0], [1.0])
    assert metrics.compute()["pairwise_accuracy"] == 1.0
    metrics.reset()
    assert metrics.compute() == dict.fromkeys(SIX, 0.0)
    assert metrics.num_pairs == 0


def test_the_standard_deviation_of_one_pair_is_zero():
    assert metrics_of([3.0], [1.0])["margin_std"] == 0.0


def test_scores_can_be_tensors_of_any_dtype_in_any_number_of_parts():
    whole = metrics_of([1.0, 0.5, 2.0], [0.0, 1.0, 0.5], [1, 1, 0])
    metrics = PreferenceMetrics()
    metrics.update(torch.tensor([[1.0], [0.5]], dtype=torch.bfloat16, requires_grad=True), np.array([0.0, 1.0]), torch.ones(2))
    metrics.update([2.0], torch.tensor([0.5]), [0])
    assert metrics.compute() == whole
    assert metrics.num_pairs == 3


def test_invalid_scores_are_refused():
    metrics = PreferenceMetrics()
    with pytest.raises(DataError, match=r"chosen_scores \(2\), rejected_scores \(1\), labels \(2\)"):
        metrics.update([1.0, 2.0], [1.0], [1, 1])
    with pytest.raises(DataError, match="1 of 2 rejected_scores are not finite"):
        metrics.update([1.0, 2.0], [1.0, float("nan")], [1, 1])
    with pytest.raises(DataError, match=r"1 of 2 labels .*\[0, 1\]"):
        metrics.update([1.0, 2.0], [1.0, 1.0], [1, 1.5])
    for settings in ({"calibration_bins": 0}, {"beta": 0.0}, {"thresholds_on": "tokens"}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            PreferenceMetrics(**settings)


def test_the_standalone_functions_by_hand():
    assert compute_pairwise_accuracy(torch.tensor([1.0, 0.0, 2.0]), [0.0, 1.0, 2.0]) == pytest.approx(1 / 3)
    assert compute_pairwise_accuracy([], []) == 0.0
    stats = compute_margin_stats([3.0, 1.0, 2.0], [1.0, 2.0, 2.0])
    assert stats["mean_margin"] == pytest.approx(1 / 3)
    assert stats["negative_margin_rate"] == pytest.approx(1 / 3)
    assert stats["margin_p50"] == 0.0
    assert compute_margin_stats([], [])["margin_std"] == 0.0


def test_the_loss_of_scores_equals_the_preference_loss():
    # z = 2 and -2 with labels 1 and 0.75
    scores = [np.array(values) for values in ([1.0, 0.0], [0.0, 1.0], [1.0, 0.75])]
    expected = (-math.log(sigma(2)) + (-0.75 * math.log(sigma(-2)) - 0.25 * math.log(sigma(2)))) / 2
    assert preference_loss(*scores, beta=2.0) == pytest.approx(expected)


def test_large_margins_do_not_overflow():
    large = np.array([1e6, -1e6])
    assert preference_probability(large, -large).tolist() == [1.0, 0.0]
    assert preference_loss(large, -large, np.ones(2)) == pytest.approx(1e6)


# --- against oracles

scores = st.integers(-8, 8).map(lambda quarter: quarter / 4)
pairs = st.lists(st.tuples(scores, scores, st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])), min_size=1, max_size=30)


@given(pairs)
def test_the_area_under_the_curve_is_the_fraction_of_comparisons_won(drawn):
    chosen, rejected, labels = zip(*drawn, strict=True)
    positives = [(score, Fraction(y)) for c, r, y in drawn for score, y in ((c, y), (r, 1 - y))]
    negatives = [(score, 1 - y) for score, y in positives]
    won = sum(y * z * (1 if s > t else Fraction(s == t, 2)) for s, y in positives for t, z in negatives)
    assert metrics_of(chosen, rejected, labels)["roc_auc"] == pytest.approx(float(won / len(drawn) ** 2), abs=1e-12)


@given(pairs, st.booleans(), st.sampled_from(["pairs", "responses"]))
def test_reversing_a_pair_and_its_label_changes_nothing(drawn, both_orders, thresholds_on):
    """Except for the calibration of one order, the decision on a label of 1/2, and the rates of
    pairs, where positives and negatives swap."""
    chosen, rejected, labels = zip(*drawn, strict=True)
    settings = {"both_orders": both_orders, "thresholds_on": thresholds_on}
    found = metrics_of(chosen, rejected, labels, **settings)
    reversed_ = metrics_of(rejected, chosen, [1 - y for y in labels], **settings)
    ordered = set() if both_orders else {"ece"}
    ordered |= {"pairwise_accuracy"} if 0.5 in labels else set()
    ordered |= {name for name in found if "@" in name} if thresholds_on == "pairs" else set()
    same = found.keys() - ordered
    assert {name: reversed_[name] for name in same} == pytest.approx({name: found[name] for name in same}, abs=1e-9)


@given(pairs)
def test_a_pair_with_label_three_quarters_equals_three_pairs_and_one_reversed(drawn):
    chosen, rejected, labels = zip(*drawn, strict=True)
    settings = {"both_orders": True, "thresholds_on": "responses"}
    found = metrics_of(chosen, rejected, labels, **settings)
    hard = [float(quarter < 4 * y) for y in labels for quarter in range(4)]
    repeated = metrics_of(np.repeat(chosen, 4), np.repeat(rejected, 4), hard, **settings)
    same = {name for name in found if name != "pairwise_accuracy" and "margin_p" not in name}
    assert {name: found[name] for name in same} == pytest.approx({name: repeated[name] for name in same}, abs=1e-9)


@given(st.lists(st.tuples(scores, scores, st.sampled_from([0.0, 1.0])), min_size=1, max_size=30))
def test_with_hard_labels_percentiles_are_those_of_the_margins(drawn):
    margins = [c - r if y else r - c for c, r, y in drawn]
    found = metrics_of(*zip(*drawn, strict=True))
    assert [found[f"margin_p{q}"] for q in (5, 25, 50, 75, 95)] == pytest.approx(np.percentile(margins, (5, 25, 50, 75, 95)))


@given(pairs)
def test_percentiles_are_continuous_in_the_labels(drawn):
    chosen, rejected, labels = zip(*drawn, strict=True)
    near = [min(max(y + 1e-9, 1e-9), 1 - 1e-9) for y in labels]
    one, other = metrics_of(chosen, rejected, labels), metrics_of(chosen, rejected, near)
    names = [name for name in one if "margin_p" in name]
    assert {name: other[name] for name in names} == pytest.approx({name: one[name] for name in names}, abs=1e-5)


@given(pairs, st.integers(1, 12), st.booleans())
def test_calibration_equals_binning_predictions_one_by_one(drawn, bins, both_orders):
    predictions = [(sigma(c - r), label) for c, r, label in drawn]
    if both_orders:
        predictions += [(sigma(r - c), 1 - label) for c, r, label in drawn]
    error = 0.0
    for k in range(bins):
        inside = [(p, y) for p, y in predictions if k / bins <= p < (k + 1) / bins]
        error += abs(sum(p for p, _ in inside) - sum(y for _, y in inside)) / len(predictions)
    chosen, rejected, labels = zip(*drawn, strict=True)
    found = metrics_of(chosen, rejected, labels, calibration_bins=bins, both_orders=both_orders)
    edges = [abs(p * bins - round(p * bins)) for p, _ in predictions if p != 0.5]
    if min(edges, default=1.0) > 1e-9:  # otherwise rounding decides on which side of an edge a prediction falls
        assert found["ece"] == pytest.approx(error, abs=1e-12)


@given(pairs, st.sampled_from([0.2, 0.5, 0.9]))
def test_rates_equal_a_confusion_matrix_counted_one_by_one(drawn, threshold):
    counts = dict.fromkeys([(a, b) for a in (False, True) for b in (False, True)], 0)
    for c, r, label in drawn:
        counts[sigma(c - r) > threshold, label > 0.5] += 1
    positives, negatives = counts[True, True] + counts[False, True], counts[True, False] + counts[False, False]
    chosen, rejected, labels = zip(*drawn, strict=True)
    found = metrics_of(chosen, rejected, labels, thresholds=[threshold])
    assert found[f"fpr@{threshold}"] == pytest.approx(counts[True, False] / negatives if negatives else 0.0)
    assert found[f"fnr@{threshold}"] == pytest.approx(counts[False, True] / positives if positives else 0.0)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=30), st.integers(1, 9))
def test_every_prediction_is_in_exactly_one_bin(predictions, bins):
    probability = np.array([p for p, _ in predictions])
    found = calibration_bins(probability, np.array([y for _, y in predictions], dtype=bool), bins)
    assert found.counts.sum() == len(predictions)
    filled = found.counts > 0
    assert (found.confidence[filled] >= found.edges[:-1][filled] - 1e-12).all()
    assert (found.confidence[filled] <= found.edges[1:][filled] + 1e-12).all()
    assert (found.confidence * found.counts).sum() == pytest.approx(probability.sum())


# --- against scikit-learn and torchmetrics


@given(pairs, st.sampled_from([-0.5, 0.25, 1.0]))
def test_labels_act_as_sample_weights_of_scikit_learn(drawn, threshold):
    chosen, rejected, labels = (np.array(column) for column in zip(*drawn, strict=True))
    found = metrics_of(chosen, rejected, labels, thresholds=[threshold], thresholds_on="responses")
    # each response twice: once as a positive, once as a negative
    scores = np.concatenate([chosen, rejected, chosen, rejected])
    target = np.repeat([1, 0], 2 * len(drawn))
    weight = np.concatenate([labels, 1 - labels, 1 - labels, labels])
    area = sklearn_metrics.roc_auc_score(target, scores, sample_weight=weight)
    assert found["roc_auc"] == pytest.approx(area, abs=1e-9)
    (tn, fp), (fn, tp) = sklearn_metrics.confusion_matrix(target, scores > threshold, labels=[0, 1], sample_weight=weight)
    rates = {f"fpr@{threshold}": fp / (fp + tn), f"fnr@{threshold}": fn / (fn + tp), f"tpr@{threshold}": tp / (fn + tp)}
    assert {name: found[name] for name in rates} == pytest.approx(rates, abs=1e-9)
    # margins: each pair in both orders; a margin of 0 is an error in neither
    margins, orders = np.concatenate([chosen - rejected, rejected - chosen]), np.concatenate([labels, 1 - labels])
    negative = sklearn_metrics.zero_one_loss(np.ones(2 * len(drawn)), margins >= 0, sample_weight=orders)
    assert found["negative_margin_rate"] == pytest.approx(negative, abs=1e-9)
    zeros = np.zeros(2 * len(drawn))
    squares = sklearn_metrics.mean_squared_error(zeros, margins, sample_weight=orders)
    assert found["margin_std"] ** 2 + found["mean_margin"] ** 2 == pytest.approx(squares, abs=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_the_metrics_equal_those_of_scikit_learn_and_torchmetrics(seed):
    draw = np.random.default_rng(seed)
    count = int(draw.integers(2, 3000))
    chosen, rejected = draw.normal(0.3, 2.0, count), draw.normal(0.0, 2.0, count)
    if seed % 2:  # ties
        chosen, rejected = chosen.round(1), rejected.round(1)
    labels = (draw.random(count) < 0.7).astype(float)
    beta, bins = float(draw.uniform(0.2, 3.0)), int(draw.integers(2, 20))
    thresholds = sorted(draw.uniform(0.05, 0.95, 3).tolist())
    found = metrics_of(chosen, rejected, labels, calibration_bins=bins, beta=beta, thresholds=thresholds)
    pooled, roles = np.concatenate([chosen, rejected]), np.concatenate([labels, 1 - labels]).astype(int)
    assert found["roc_auc"] == pytest.approx(sklearn_metrics.roc_auc_score(roles, pooled), abs=1e-9)
    probability = 1 / (1 + np.exp(-beta * (chosen - rejected)))
    target = torch.tensor(labels > 0.5).long()
    error = classification.binary_calibration_error(torch.tensor(probability), target, n_bins=bins, norm="l1")
    assert found["ece"] == pytest.approx(error.item(), abs=1e-9)
    area = classification.binary_auroc(torch.tensor(1 / (1 + np.exp(-pooled))), torch.tensor(roles))
    assert found["roc_auc"] == pytest.approx(area.item(), abs=1e-6)  # torchmetrics sums in float32
    for threshold in thresholds:
        tn, fp, fn, tp = sklearn_metrics.confusion_matrix(labels, probability > threshold, labels=[0, 1]).ravel()
        assert found[f"fpr@{threshold}"] == pytest.approx(fp / (fp + tn) if fp + tn else 0.0, abs=1e-9)
        assert found[f"fnr@{threshold}"] == pytest.approx(fn / (fn + tp) if fn + tp else 0.0, abs=1e-9)
    untied = chosen != rejected
    right = sklearn_metrics.accuracy_score(labels[untied], chosen[untied] > rejected[untied], normalize=False)
    assert found["pairwise_accuracy"] == pytest.approx(right / count, abs=1e-9)
