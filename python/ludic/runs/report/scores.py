"""The scores of the held-out pairs of a reward model, as heldout_scores.json has them, and the two
pictures that follow from them: margins and calibration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ludic.training.classification_metrics import PreferenceMetrics, margins_in_both_orders, percentiles

_BINS = 40


def encode_scores(metrics: PreferenceMetrics) -> str:
    """JSON with the scores of P pairs: `chosen`, `rejected` and `labels` [P], and what the
    probabilities were computed with, `beta`, `both_orders` and `calibration_bins`."""
    columns = (column.round(6).tolist() for column in metrics.scores)
    content = {
        **dict(zip(("chosen", "rejected", "labels"), columns, strict=True)),
        "beta": metrics.beta,
        "both_orders": metrics.both_orders,
        "calibration_bins": metrics.calibration_bins,
    }
    return json.dumps(content) + "\n"


def decode_scores(content: Mapping[str, Any]) -> PreferenceMetrics:
    """The inverse of `encode_scores`. Raises KeyError, TypeError or DataError for other content."""
    metrics = PreferenceMetrics(
        calibration_bins=int(content["calibration_bins"]),
        beta=float(content["beta"]),
        both_orders=bool(content["both_orders"]),
    )
    metrics.update(content["chosen"], content["rejected"], content["labels"])
    return metrics


def describe_preferences(metrics: PreferenceMetrics) -> dict[str, Any]:
    """The numbers of both pictures: `margins`, a histogram (`edges` [K + 1] with one at 0, `counts`
    [K] of margins of the preferred response), their `median`, and `calibration`, with the `error`
    and for each bin the number of predictions, the mean prediction and the mean outcome."""
    chosen, rejected, labels = metrics.scores
    margins, weights = margins_in_both_orders(chosen - rejected, labels)
    reach = max(float(np.abs(margins).max(initial=0.0)), 1e-9)
    edges = np.arange(-_BINS // 2, _BINS // 2 + 1) * (2 * reach / _BINS)
    edges[0], edges[-1] = -reach, reach  # the largest margin is inside
    bins = metrics.calibration()
    return {
        "pairs": metrics.num_pairs,
        "margins": {
            "edges": edges.tolist(),
            "counts": np.histogram(margins, edges, weights=weights)[0].tolist(),
            "negative": float(weights[margins < 0].sum() / max(weights.sum(), 1e-12)),
            "median": percentiles(chosen - rejected, labels)["margin_p50"],
        },
        "calibration": {
            "error": metrics.compute()["ece"],
            "edges": bins.edges.tolist(),
            "counts": bins.counts.tolist(),
            "predicted": bins.confidence.tolist(),
            "observed": bins.frequency.tolist(),
        },
    }
