"""Metrics of preference scores: accuracy, margins, calibration, and error rates at a threshold.

There are P pairs. Each has the scores of the chosen and of the rejected response, and a label y,
the probability that the chosen response is better. The margin m is the chosen score minus the
rejected score. Everything is computed in float64 from the scores of single responses.

A pair counts as two: (chosen, rejected) with weight y and (rejected, chosen) with weight 1 - y. So
label 1 is the pair itself, label 0 the reversed pair, and label 0.75 is three pairs and one
reversed pair, each with weight 1/4. Margins, ROC AUC, calibration and rates of responses are means
with these weights, as in scikit-learn with `sample_weight`. Decisions on a pair (accuracy, and
rates of pairs) are compared with the more likely order: chosen is better if y > 1/2, else rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ludic.columns import array_mean_or_zero
from ludic.errors import DataError, check_value

Floats = NDArray[np.float64]
PERCENTILES = (5, 25, 50, 75, 95)
"""Percentiles of the margins, reported as `margin_p5` and so on."""


@dataclass
class PreferenceMetrics:
    """Collects scores and computes their metrics.

    >>> metrics = PreferenceMetrics()
    >>> metrics.update(chosen_scores=[2.0, 0.5], rejected_scores=[1.0, 1.0], labels=[1.0, 1.0])
    >>> metrics.compute()["pairwise_accuracy"]
    0.5
    """

    calibration_bins: int = 10
    """Bins of equal width over [0, 1]."""
    thresholds: Sequence[float] | None = field(default_factory=lambda: [0.5])
    """Thresholds t of `fpr@t` and `fnr@t`. None means no thresholds."""
    beta: float = 1.0
    """sigma(beta m) is the probability that the chosen response is better."""
    thresholds_on: Literal["pairs", "responses"] = field(default="pairs", kw_only=True)
    """What a threshold classifies. `pairs`: sigma(beta m) > t, compared with y > 1/2. `responses`:
    score > t; preferred responses are the positives, the others the negatives. This adds
    `tpr@t`."""
    both_orders: bool = field(default=False, kw_only=True)
    """Compute the calibration over each pair in both orders: p with y, and 1 - p with 1 - y.
    Without it, data with only labels 1 has no negatives, and `ece` is the mean of 1 - p."""

    def __post_init__(self) -> None:
        check_value("calibration_bins", self.calibration_bins, least=1)
        check_value("beta", self.beta, above=0)
        check_value("thresholds_on", self.thresholds_on, choices=("pairs", "responses"))
        self.reset()

    def reset(self) -> None:
        """Forget all scores."""
        self._columns: list[tuple[Floats, Floats, Floats]] = []

    def update(self, chosen_scores: Any, rejected_scores: Any, labels: Any = None) -> None:
        """Add pairs: tensors, arrays or lists [P] of numbers. Without labels, all labels are 1.
        Raises DataError for different lengths, for scores that are not finite, and for labels
        outside [0, 1]."""
        chosen, rejected = as_floats(chosen_scores), as_floats(rejected_scores)
        label = np.ones_like(chosen) if labels is None else as_floats(labels)
        if not len(chosen) == len(rejected) == len(label):
            raise DataError(f"chosen_scores ({len(chosen)}), rejected_scores ({len(rejected)}), labels ({len(label)}) must match")
        for name, values in (("chosen_scores", chosen), ("rejected_scores", rejected), ("labels", label)):
            if not np.isfinite(values).all():
                raise DataError(f"{int((~np.isfinite(values)).sum())} of {len(values)} {name} are not finite")
        outside = (label < 0) | (label > 1)
        if outside.any():
            raise DataError(f"{int(outside.sum())} of {len(label)} labels are outside [0, 1]; they must be probabilities")
        self._columns.append((chosen, rejected, label))

    @property
    def num_pairs(self) -> int:
        return sum(len(chosen) for chosen, _, _ in self._columns)

    @property
    def scores(self) -> tuple[Floats, Floats, Floats]:
        """[P] scores of the chosen responses, [P] of the rejected ones, and [P] labels."""
        empty = [(np.zeros(0),) * 3]
        chosen, rejected, labels = (np.concatenate(column) for column in zip(*(self._columns or empty), strict=True))
        return chosen, rejected, labels

    def compute(self) -> dict[str, float]:
        """`pairwise_accuracy`, `mean_margin`, `margin_std`, `negative_margin_rate`, `roc_auc` and
        `ece`, then `margin_p5` to `margin_p95`, and `fpr@t` and `fnr@t` of each threshold. Without
        any pair, the first six, each 0.

        - `pairwise_accuracy`: fraction of pairs with m > 0 if y > 1/2, with m < 0 otherwise; a tie
          is wrong.
        - `mean_margin`, `margin_std` (population), `negative_margin_rate` (margins below 0): of the
          margins m with weight y and -m with weight 1 - y.
        - `margin_pQ`: the Q-th percentile of these; see `percentiles`.
        - `roc_auc`: over all responses of all pairs. Chosen responses are positives with weight y
          and negatives with weight 1 - y, rejected responses the reverse; see `roc_auc`.
        - `ece`: calibration error of the predictions sigma(beta m) for the outcomes y; see
          `calibration_error`.
        - `fpr@t`, `fnr@t`, `tpr@t`: fraction of negatives above t, of positives not above t, and of
          positives above t. Over pairs, or over responses with the weights of `roc_auc`, depending
          on `thresholds_on`; 0 if there are none.
        """
        chosen, rejected, labels = self.scores
        metrics = {
            "pairwise_accuracy": pairwise_accuracy(chosen, rejected, labels > 0.5),
            **_margin_moments(*margins_in_both_orders(chosen - rejected, labels)),
            "roc_auc": roc_auc(*_pool_responses(chosen, rejected, labels)),
            "ece": calibration_error(self.calibration()),
        }
        if len(chosen):
            metrics |= percentiles(chosen - rejected, labels)
            for threshold in self.thresholds or ():
                metrics |= self._error_rates(threshold, chosen, rejected, labels)
        return metrics

    def calibration(self) -> CalibrationBins:
        """Return the data of a reliability diagram."""
        chosen, rejected, labels = self.scores
        probability = preference_probability(chosen, rejected, self.beta)
        if self.both_orders:
            probability = np.concatenate([probability, preference_probability(rejected, chosen, self.beta)])
            labels = np.concatenate([labels, 1.0 - labels])
        return calibration_bins(probability, labels, self.calibration_bins)

    def _error_rates(self, threshold: float, chosen: Floats, rejected: Floats, labels: Floats) -> dict[str, float]:
        if self.thresholds_on == "pairs":
            above, better = preference_probability(chosen, rejected, self.beta) > threshold, labels > 0.5
            return {
                f"fpr@{threshold}": array_mean_or_zero(above[~better]),
                f"fnr@{threshold}": array_mean_or_zero(~above[better]),
            }
        scores, positive, negative = _pool_responses(chosen, rejected, labels)
        above = scores > threshold
        return {
            f"fpr@{threshold}": float(negative[above].sum() / negative.sum()),
            f"fnr@{threshold}": float(positive[~above].sum() / positive.sum()),
            f"tpr@{threshold}": float(positive[above].sum() / positive.sum()),
        }


def compute_pairwise_accuracy(chosen_scores: Any, rejected_scores: Any) -> float:
    """Fraction of pairs with a higher score of the chosen response; a tie is wrong. 0.0 without
    pairs."""
    chosen, rejected = as_floats(chosen_scores), as_floats(rejected_scores)
    return pairwise_accuracy(chosen, rejected, np.ones(len(chosen), dtype=bool))


def compute_margin_stats(chosen_scores: Any, rejected_scores: Any, labels: Any = None) -> dict[str, float]:
    """Return `mean_margin`, `margin_std` (population), `negative_margin_rate`, and the percentiles.
    Without labels, all labels are 1."""
    margins = as_floats(chosen_scores) - as_floats(rejected_scores)
    label = np.ones_like(margins) if labels is None else as_floats(labels)
    return {**_margin_moments(*margins_in_both_orders(margins, label)), **percentiles(margins, label)}


def pairwise_accuracy(chosen: Floats, rejected: Floats, better: NDArray[np.bool]) -> float:
    """Fraction of pairs with m > 0 if the chosen response is better, with m < 0 if it is not."""
    margins = chosen - rejected
    return array_mean_or_zero(np.where(better, margins > 0, margins < 0))


def preference_probability(chosen: Floats, rejected: Floats, beta: float = 1.0) -> Floats:
    """[P] sigma(beta m)."""
    return np.exp(-np.logaddexp(0.0, -beta * (chosen - rejected)))


def preference_loss(chosen: Floats, rejected: Floats, labels: Floats, beta: float = 1.0) -> float:
    """Mean of -[y log sigma(beta m) + (1 - y) log sigma(-beta m)], in nats; 0.0 without pairs."""
    margins = beta * (chosen - rejected)
    losses = labels * np.logaddexp(0.0, -margins) + (1.0 - labels) * np.logaddexp(0.0, margins)
    return array_mean_or_zero(losses)


def margins_in_both_orders(margins: Floats, labels: Floats) -> tuple[Floats, Floats]:
    """[N] margins of the preferred response minus the other, and [N] weights: m with weight y and
    -m with weight 1 - y. Entries with weight 0 are left out; the weights add up to the number of
    pairs.

    Example: margins [2, 1] with labels [1, 0.75] give [2, 1, -1] with weights [1, 0.75, 0.25].
    """
    signed, weights = np.concatenate([margins, -margins]), np.concatenate([labels, 1.0 - labels])
    return signed[weights > 0], weights[weights > 0]


def _pool_responses(chosen: Floats, rejected: Floats, labels: Floats) -> tuple[Floats, Floats, Floats]:
    """[2P] scores, [2P] weights as positives and [2P] weights as negatives; the two weights of a
    response add up to 1.

    Example: scores 2 (chosen) and 1 (rejected) with label 0.75 give [2, 1], [0.75, 0.25] and
    [0.25, 0.75].
    """
    positive = np.concatenate([labels, 1.0 - labels])
    return np.concatenate([chosen, rejected]), positive, 1.0 - positive


def roc_auc(scores: Floats, positive: Floats, negative: Floats) -> float:
    """Area under the ROC curve: the probability that a positive has a higher score than a negative,
    with ties counted as one half (the Mann-Whitney statistic; Hanley and McNeil 1982). Score i is a
    positive with weight `positive[i]` and a negative with weight `negative[i]`.

        sum_ij positive_i negative_j ([s_i > s_j] + [s_i = s_j] / 2) / (sum positive * sum negative)

    0.0 if one of the sums is 0.

    Example: scores [2, 1, 1] with positives [1, 1, 0] and negatives [0, 0, 1]: the pairs (2, 1) and
    (1, 1) give (1 + 1/2) / 2 = 0.75.
    """
    if not positive.sum() or not negative.sum():
        return 0.0
    values, index = np.unique(scores, return_inverse=True)
    positives, negatives = (np.bincount(index, weights, len(values)) for weights in (positive, negative))
    negatives_below = np.cumsum(negatives) - negatives
    return float((positives * (negatives_below + negatives / 2)).sum() / (positive.sum() * negative.sum()))


@dataclass(frozen=True)
class CalibrationBins:
    """Predictions in bins of equal width, [a, b); the last bin includes its upper end."""

    edges: Floats
    """[K + 1] from 0 to 1."""
    counts: NDArray[np.int64]
    """[K] number of predictions."""
    confidence: Floats
    """[K] mean prediction; 0 for an empty bin."""
    frequency: Floats
    """[K] mean outcome; 0 for an empty bin."""


def calibration_bins(probability: Floats, outcomes: NDArray[Any], bins: int = 10) -> CalibrationBins:
    """Sort [N] predictions in [0, 1] into bins. `outcomes` [N]: whether each came true, as a
    boolean or a frequency in [0, 1].

    Example: predictions [0.2, 0.5, 1.0] and 2 bins with edges [0, 0.5, 1] have the bin indices
    [0, 1, 1].
    """
    edges = np.linspace(0.0, 1.0, bins + 1)
    bin_index = np.clip(np.searchsorted(edges, probability, "right") - 1, 0, bins - 1)
    counts = np.bincount(bin_index, minlength=bins)
    filled = np.maximum(counts, 1)
    return CalibrationBins(
        edges,
        counts,
        np.bincount(bin_index, probability, bins) / filled,
        np.bincount(bin_index, outcomes.astype(np.float64), bins) / filled,
    )


def calibration_error(bins: CalibrationBins) -> float:
    """Expected calibration error: the mean over predictions of |confidence - frequency| of their
    bin (Guo et al. 2017, arXiv:1706.04599, eq. 3). 0.0 without predictions."""
    total = bins.counts.sum()
    return float((bins.counts * np.abs(bins.confidence - bins.frequency)).sum() / total) if total else 0.0


def percentiles(margins: Floats, labels: Floats) -> dict[str, float]:
    """Return `margin_p5` to `margin_p95` of P margins in both orders, linearly interpolated; 0
    without margins.

    The sorted margins, concatenated as segments with their weights as lengths, cover [0, P]. The
    k-th smallest value is the mean over [k - 1, k]. If every label is 0 or 1, this is the k-th
    smallest margin.

    Example: margins [-1, 1, 2] with weights [0.25, 0.75, 1] and P = 2. The first value is
    0.25 * -1 + 0.75 * 1 = 0.5, the second is 2.
    """
    signed, weights = margins_in_both_orders(margins, labels)
    order = np.argsort(signed, kind="stable")
    ranked, heights = signed[order], weights[order]
    if (heights != 1.0).any():
        sums = np.interp(np.arange(len(margins) + 1), np.cumsum([0.0, *heights]), np.cumsum([0.0, *(heights * ranked)]))
        ranked = np.diff(sums)
    values = np.percentile(ranked, PERCENTILES) if len(ranked) else np.zeros(len(PERCENTILES))
    return {f"margin_p{percent}": float(value) for percent, value in zip(PERCENTILES, values, strict=True)}


def as_floats(values: Any) -> Floats:
    """Convert a tensor, an array or a list of numbers to float64 [N]."""
    if hasattr(values, "detach"):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64).reshape(-1)


def _margin_moments(margins: Floats, weights: Floats) -> dict[str, float]:
    if not len(margins):
        return dict.fromkeys(("mean_margin", "margin_std", "negative_margin_rate"), 0.0)
    mean = np.average(margins, weights=weights)
    return {
        "mean_margin": float(mean),
        "margin_std": float(np.sqrt(np.average((margins - mean) ** 2, weights=weights))),
        "negative_margin_rate": float(weights[margins < 0].sum() / weights.sum()),
    }
