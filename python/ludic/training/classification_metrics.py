"""How well scores tell the preferred response of a pair: accuracy, margins, calibration, and errors at a threshold.

P pairs, each with a score for the chosen and one for the rejected response and a label y, the probability that the chosen one is the
better; m is the margin, chosen less rejected. All is computed in float64 from the scores of single responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ludic.errors import ConfigError, DataError

Floats = NDArray[np.float64]
PERCENTILES = (5, 25, 50, 75, 95)
"""Of the margins, as `margin_p5` and so on."""


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
    """Where `fpr@t` and `fnr@t` are computed; None: nowhere."""
    beta: float = 1.0
    """sigma(beta m) is the probability that the chosen response is the better."""
    thresholds_on: Literal["pairs", "responses"] = field(default="pairs", kw_only=True)
    """What a threshold divides. `pairs`: sigma(beta m) > t, against y > 1/2. `responses`: score > t, the chosen responses being
    the positives and the rejected ones the negatives; `tpr@t` as well."""
    both_orders: bool = field(default=False, kw_only=True)
    """Calibrate over each pair in both orders, p against y > 1/2 and 1 - p against the contrary. Without it, data whose chosen response is
    always the preferred one have no negatives, and their `ece` is the mean of 1 - p."""

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
        """Add pairs: tensors, arrays or lists [P] of numbers; without labels the chosen responses are the better ones. Raises DataError
        for another number of them, and for scores that are not finite."""
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
        self._columns.append((chosen, rejected, label))

    @property
    def num_pairs(self) -> int:
        return sum(len(chosen) for chosen, _, _ in self._columns)

    @property
    def scores(self) -> tuple[Floats, Floats, Floats]:
        """[P] scores of the chosen responses, of the rejected ones, and labels."""
        empty = [(np.zeros(0),) * 3]
        chosen, rejected, labels = (np.concatenate(column) for column in zip(*(self._columns or empty), strict=True))
        return chosen, rejected, labels

    def compute(self) -> dict[str, float]:
        """`pairwise_accuracy`, `mean_margin`, `margin_std`, `negative_margin_rate`, `roc_auc` and `ece`, then `margin_p5` to `margin_p95`,
        and `fpr@t` and `fnr@t` of each threshold. Without any pair, the first six, each 0."""
        chosen, rejected, labels = self.scores
        better = labels > 0.5
        metrics = {
            "pairwise_accuracy": pairwise_accuracy(chosen, rejected, better),
            **_spread(chosen - rejected),
            "roc_auc": roc_auc(chosen, rejected),
            "ece": calibration_error(self._calibration()),
        }
        if len(chosen):
            metrics |= percentiles(chosen - rejected)
            for threshold in self.thresholds or ():
                metrics |= self._at(threshold, chosen, rejected, better)
        return metrics

    def calibration(self) -> CalibrationBins:
        """What a reliability diagram shows."""
        return self._calibration()

    def _calibration(self) -> CalibrationBins:
        chosen, rejected, labels = self.scores
        probability, better = preference_probability(chosen, rejected, self.beta), labels > 0.5
        if self.both_orders:
            mirrored = preference_probability(rejected, chosen, self.beta)
            probability, better = np.concatenate([probability, mirrored]), np.concatenate([better, ~better])
        return calibration_bins(probability, better, self.calibration_bins)

    def _at(self, threshold: float, chosen: Floats, rejected: Floats, better: NDArray[np.bool]) -> dict[str, float]:
        if self.thresholds_on == "pairs":
            above = preference_probability(chosen, rejected, self.beta) > threshold
            return {f"fpr@{threshold}": _share(above[~better]), f"fnr@{threshold}": _share(~above[better])}
        missed = _share(chosen <= threshold)
        return {
            f"fpr@{threshold}": _share(rejected > threshold),
            f"fnr@{threshold}": missed,
            f"tpr@{threshold}": 1.0 - missed if len(chosen) else 0.0,
        }


def compute_pairwise_accuracy(chosen_scores: Any, rejected_scores: Any) -> float:
    """Share of pairs whose chosen response scores higher; a tie is wrong. 0.0 without pairs."""
    chosen, rejected = as_floats(chosen_scores), as_floats(rejected_scores)
    return pairwise_accuracy(chosen, rejected, np.ones(len(chosen), dtype=bool))


def compute_margin_stats(chosen_scores: Any, rejected_scores: Any) -> dict[str, float]:
    """`mean_margin`, `margin_std` (population), `negative_margin_rate`, and the percentiles."""
    margins = as_floats(chosen_scores) - as_floats(rejected_scores)
    return {**_spread(margins), **percentiles(margins)}


def pairwise_accuracy(chosen: Floats, rejected: Floats, better: NDArray[np.bool]) -> float:
    """Share of pairs with m > 0 where the chosen response is the better one, m < 0 where it is not."""
    margins = chosen - rejected
    return _share(np.where(better, margins > 0, margins < 0))


def preference_probability(chosen: Floats, rejected: Floats, beta: float = 1.0) -> Floats:
    """[P] sigma(beta m)."""
    return np.exp(-np.logaddexp(0.0, -beta * (chosen - rejected)))


def preference_loss(chosen: Floats, rejected: Floats, labels: Floats, beta: float = 1.0) -> float:
    """Mean of -[y log sigma(beta m) + (1 - y) log sigma(-beta m)], in nats; 0.0 without pairs."""
    margins = beta * (chosen - rejected)
    losses = labels * np.logaddexp(0.0, -margins) + (1.0 - labels) * np.logaddexp(0.0, margins)
    return _mean(losses)


def roc_auc(positive: Floats, negative: Floats) -> float:
    """Area under the ROC curve: the probability that a positive scores higher than a negative, half of ties included (the
    Mann-Whitney statistic; Hanley and McNeil 1982). 0.0 where either is empty."""
    if not len(positive) or not len(negative):
        return 0.0
    ordered = np.sort(negative)
    below, upto = np.searchsorted(ordered, positive, "left"), np.searchsorted(ordered, positive, "right")
    return float((below + upto).sum()) / (2 * len(positive) * len(negative))


@dataclass(frozen=True)
class CalibrationBins:
    """Predictions sorted into bins of equal width, [a, b); the last has its upper end, too."""

    edges: Floats
    """[K + 1] from 0 to 1."""
    counts: NDArray[np.int64]
    """[K] predictions."""
    confidence: Floats
    """[K] mean prediction; 0 where there is none."""
    frequency: Floats
    """[K] how often it came true; 0 where there is none."""


def calibration_bins(probability: Floats, came_true: NDArray[np.bool], bins: int = 10) -> CalibrationBins:
    """[N] predictions in [0, 1], and [N] what happened."""
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.clip(np.searchsorted(edges, probability, "right") - 1, 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    filled = np.maximum(counts, 1)
    return CalibrationBins(
        edges,
        counts,
        np.bincount(place, probability, bins) / filled,
        np.bincount(place, came_true.astype(np.float64), bins) / filled,
    )


def calibration_error(found: CalibrationBins) -> float:
    """Expected calibration error: the mean over predictions of |confidence - frequency| of their bin (Guo et al. 2017,
    arXiv:1706.04599, eq. 3). 0.0 without any."""
    total = found.counts.sum()
    return float((found.counts * np.abs(found.confidence - found.frequency)).sum() / total) if total else 0.0


def percentiles(margins: Floats) -> dict[str, float]:
    """`margin_p5` to `margin_p95`, interpolated between neighbours; 0 without margins."""
    values = np.percentile(margins, PERCENTILES) if len(margins) else np.zeros(len(PERCENTILES))
    return {f"margin_p{percent}": float(value) for percent, value in zip(PERCENTILES, values, strict=True)}


def as_floats(values: Any) -> Floats:
    """A tensor, an array or a list of numbers as float64 [N]."""
    if hasattr(values, "detach"):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64).reshape(-1)


def _spread(margins: Floats) -> dict[str, float]:
    return {
        "mean_margin": _mean(margins),
        "margin_std": float(margins.std()) if len(margins) > 1 else 0.0,
        "negative_margin_rate": _share(margins < 0),
    }


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


def _share(flags: NDArray[np.bool]) -> float:
    return float(flags.mean()) if len(flags) else 0.0
