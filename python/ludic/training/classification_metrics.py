"""How well scores identify the preferred response of a pair: accuracy, margins, calibration, and
errors at a threshold.

P pairs, each with a score of the chosen and one of the rejected response and a label y, the
probability that the chosen one is better; the margin m is chosen minus rejected. Everything is
computed in float64 from the scores of single responses.

A pair stands for two: (chosen, rejected) with weight y and (rejected, chosen) with weight 1 - y. So
label 1 is the pair as it is, 0 the pair reversed, and 0.75 three such pairs of four. Margins, the
area under the curve, calibration and rates of responses are means with these weights, as
scikit-learn computes them with `sample_weight`. Decisions on a pair (accuracy, and rates of pairs)
are compared with the likelier order: the chosen response if y > 1/2, else the rejected one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ludic.errors import ConfigError, DataError
from ludic.training.averages import array_mean_or_zero

Floats = NDArray[np.float64]
PERCENTILES = (5, 25, 50, 75, 95)
"""Percentiles of the margins, reported as `margin_p5` and so on."""


@dataclass
class PreferenceMetrics:
    """Collects scores, and computes the metrics of all of them.

    >>> metrics = PreferenceMetrics()
    >>> metrics.update(chosen_scores=[2.0, 0.5], rejected_scores=[1.0, 1.0], labels=[1.0, 1.0])
    >>> metrics.compute()["pairwise_accuracy"]
    0.5
    """

    calibration_bins: int = 10
    """Bins of equal width over [0, 1]."""
    thresholds: Sequence[float] | None = field(default_factory=lambda: [0.5])
    """Where `fpr@t` and `fnr@t` are computed; None for nowhere."""
    beta: float = 1.0
    """sigma(beta m) is the probability that the chosen response is better."""
    thresholds_on: Literal["pairs", "responses"] = field(default="pairs", kw_only=True)
    """What a threshold divides. `pairs`: sigma(beta m) > t, compared with y > 1/2. `responses`:
    score > t, where the preferred responses are the positives and the others the negatives; this
    adds `tpr@t`."""
    both_orders: bool = field(default=False, kw_only=True)
    """Calibrate over each pair in both orders, p against y and 1 - p against 1 - y. Without it,
    data whose chosen response is always the preferred one have no negatives, and their `ece` is the
    mean of 1 - p."""

    def __post_init__(self) -> None:
        if self.calibration_bins < 1:
            raise ConfigError(f"calibration_bins ({self.calibration_bins}) must be >= 1")
        if self.beta <= 0:
            raise ConfigError(f"beta ({self.beta}) must be positive")
        if self.thresholds_on not in ("pairs", "responses"):
            raise ConfigError(f"thresholds_on ({self.thresholds_on!r}) must be pairs or responses")
        self.reset()

    def reset(self) -> None:
        """Forget all scores."""
        self._columns: list[tuple[Floats, Floats, Floats]] = []

    def update(self, chosen_scores: Any, rejected_scores: Any, labels: Any = None) -> None:
        """Add pairs: tensors, arrays or lists [P] of numbers. Without labels the chosen responses
        are the better ones. Raises DataError for different lengths, for scores that are not finite,
        and for labels outside [0, 1]."""
        chosen, rejected = as_floats(chosen_scores), as_floats(rejected_scores)
        label = np.ones_like(chosen) if labels is None else as_floats(labels)
        if not len(chosen) == len(rejected) == len(label):
            raise DataError(
                f"chosen_scores ({len(chosen)}), rejected_scores ({len(rejected)}) and labels ({len(label)}) must be equally many"
            )
        for name, values in (("chosen_scores", chosen), ("rejected_scores", rejected), ("labels", label)):
            if not np.isfinite(values).all():
                raise DataError(
                    f"{int((~np.isfinite(values)).sum())} of {len(values)} {name} are not finite; nothing can be said of them"
                )
        outside = (label < 0) | (label > 1)
        if outside.any():
            raise DataError(
                f"{int(outside.sum())} of {len(label)} labels are outside [0, 1]; a label is the probability that the chosen response is "
                "the better"
            )
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

        - `pairwise_accuracy`: share of pairs with m > 0 where y > 1/2, m < 0 where it is not; a tie
          is wrong.
        - `mean_margin`, `margin_std` (population), `negative_margin_rate` (margins below 0): of the
          margins m with weight y and -m with weight 1 - y.
        - `margin_pQ`: the Q-th percentile of these; see `percentiles`.
        - `roc_auc`: over all responses of all pairs, chosen ones being positives with weight y and
          negatives with weight 1 - y, rejected ones the contrary; see `roc_auc`.
        - `ece`: of the predictions sigma(beta m), which come true with frequency y; see
          `calibration_error`.
        - `fpr@t`, `fnr@t`, `tpr@t`: shares of the negatives above t, and of the positives that are
          not and that are. Of pairs, or of responses with the weights of `roc_auc`, as
          `thresholds_on` says; 0 where there are none.
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
        """What a reliability diagram shows."""
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
    """Share of pairs whose chosen response scores higher; a tie is wrong. 0.0 without pairs."""
    chosen, rejected = as_floats(chosen_scores), as_floats(rejected_scores)
    return pairwise_accuracy(chosen, rejected, np.ones(len(chosen), dtype=bool))


def compute_margin_stats(chosen_scores: Any, rejected_scores: Any, labels: Any = None) -> dict[str, float]:
    """`mean_margin`, `margin_std` (population), `negative_margin_rate`, and the percentiles.
    Without labels the chosen responses are the better ones."""
    margins = as_floats(chosen_scores) - as_floats(rejected_scores)
    label = np.ones_like(margins) if labels is None else as_floats(labels)
    return {**_margin_moments(*margins_in_both_orders(margins, label)), **percentiles(margins, label)}


def pairwise_accuracy(chosen: Floats, rejected: Floats, better: NDArray[np.bool]) -> float:
    """Share of pairs with m > 0 if the chosen response is better, m < 0 if it is not."""
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
    -m with weight 1 - y; entries of weight 0 are left out. The weights sum to the number of pairs.

    Example: margins [2, 1] with labels [1, 0.75] give [2, 1, -1] with weights [1, 0.75, 0.25].
    """
    signed, weights = np.concatenate([margins, -margins]), np.concatenate([labels, 1.0 - labels])
    return signed[weights > 0], weights[weights > 0]


def _pool_responses(chosen: Floats, rejected: Floats, labels: Floats) -> tuple[Floats, Floats, Floats]:
    """[2P] scores, and [2P] weights of each as a positive and as a negative; the two weights of a
    response sum to 1."""
    positive = np.concatenate([labels, 1.0 - labels])
    return np.concatenate([chosen, rejected]), positive, 1.0 - positive


def roc_auc(scores: Floats, positive: Floats, negative: Floats) -> float:
    """Area under the ROC curve: the probability that a positive scores higher than a negative, half
    of ties included (the Mann-Whitney statistic; Hanley and McNeil 1982), where score i is drawn as
    positive in proportion to `positive[i]`, as negative to `negative[i]`.

        sum_ij positive_i negative_j ([s_i > s_j] + [s_i = s_j] / 2) / (sum positive * sum negative)

    0.0 where either sum is 0.
    """
    if not positive.sum() or not negative.sum():
        return 0.0
    values, place = np.unique(scores, return_inverse=True)
    at, against = (np.bincount(place, weights, len(values)) for weights in (positive, negative))
    below = np.cumsum(against) - against
    return float((at * (below + against / 2)).sum() / (positive.sum() * negative.sum()))


@dataclass(frozen=True)
class CalibrationBins:
    """Predictions in bins of equal width, [a, b); the last bin includes its upper end."""

    edges: Floats
    """[K + 1] from 0 to 1."""
    counts: NDArray[np.int64]
    """[K] numbers of predictions."""
    confidence: Floats
    """[K] mean predictions; 0 for an empty bin."""
    frequency: Floats
    """[K] how often the predictions came true; 0 for an empty bin."""


def calibration_bins(probability: Floats, outcomes: NDArray[Any], bins: int = 10) -> CalibrationBins:
    """[N] predictions in [0, 1], and [N] how often each came true: booleans, or shares in [0,
    1]."""
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.clip(np.searchsorted(edges, probability, "right") - 1, 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    filled = np.maximum(counts, 1)
    return CalibrationBins(
        edges,
        counts,
        np.bincount(place, probability, bins) / filled,
        np.bincount(place, outcomes.astype(np.float64), bins) / filled,
    )


def calibration_error(bins: CalibrationBins) -> float:
    """Expected calibration error: the mean over predictions of |confidence - frequency| of their
    bin (Guo et al. 2017, arXiv:1706.04599, eq. 3). 0.0 without predictions."""
    total = bins.counts.sum()
    return float((bins.counts * np.abs(bins.confidence - bins.frequency)).sum() / total) if total else 0.0


def percentiles(margins: Floats, labels: Floats) -> dict[str, float]:
    """`margin_p5` to `margin_p95` of P margins in both orders, interpolated between neighbours; 0
    without margins.

    The sorted margins, laid end to end with their weights as lengths, reach from 0 to P; the k-th
    smallest margin is the mean from k - 1 to k. If every label is 0 or 1 that is the k-th of the
    margins.

    Example: margins [-1, 1, 2] with weights [0.25, 0.75, 1] and P = 2: the first is 0.25 * -1 +
    0.75 * 1 = 0.5, the second 2.
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
    """float64 [N] from a tensor, an array or a list of numbers."""
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
