"""Pictures of preference scores: how far stated probabilities come true, and how far apart the
two responses of a pair are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ludic.errors import DataError
from ludic.training.classification_metrics import CalibrationBins, PreferenceMetrics, margins_in_both_orders, percentiles

_MARGIN_BINS = 40


def draw_reliability(path: Path, metrics: PreferenceMetrics, *, title: str) -> None:
    """A reliability diagram of the scores that `metrics` holds, written as PNG: for each bin of
    stated probabilities how often they came true, beside the diagonal on which they would be
    right, and below how many there are. Raises DataError without scores."""
    _check(metrics)
    figure = _figure((5.4, 6))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    found = metrics.calibration()
    _calibration(upper, found)
    lower.bar(_middles(found), found.counts, width=_width(found), color="C0", alpha=0.6)
    error = metrics.compute()["ece"]
    upper.set(xlim=(0, 1), ylim=(0, 1.03), ylabel="how often it is preferred", title=f"expected calibration error {error:.3f}")
    orders = ", each in both orders" if metrics.both_orders else ""
    lower.set(xlabel="probability that a response is preferred, as stated", ylabel="predictions")
    lower.set_title(f"{metrics.num_pairs:,} pairs{orders}", fontsize="medium")
    upper.legend(loc="upper left")
    _finish(figure, (upper, lower), path, title)


def draw_margins(path: Path, metrics: PreferenceMetrics, *, title: str) -> None:
    """A histogram of the margins, the preferred response's score less that of the other, written
    as PNG; those below 0 in another colour. A pair whose label is a probability counts in both
    orders, with their weights. Raises DataError without scores."""
    _check(metrics)
    chosen, rejected, labels = metrics.scores
    margins, weights = margins_in_both_orders(chosen - rejected, labels)
    figure = _figure((7, 4))
    axes = figure.subplots()
    edges = _edges(margins)
    for part, colour, name in ((margins > 0, "C0", "right"), (margins < 0, "C3", "wrong")):
        share = weights[part].sum() / weights.sum()
        axes.hist(margins[part], bins=edges, weights=weights[part], color=colour, alpha=0.6, label=f"{name}: {share:.1%}")
    median = percentiles(chosen - rejected, labels)["margin_p50"]
    axes.axvline(0.0, color="black", linewidth=1)
    axes.axvline(median, color="black", linewidth=1, linestyle="--", label=f"median {median:.2f}")
    axes.set(
        xlabel="score of the preferred response less that of the other", ylabel="pairs", title=f"{metrics.num_pairs:,} pairs"
    )
    axes.legend(loc="best")
    _finish(figure, (axes,), path, title)


def _calibration(axes: Any, found: CalibrationBins) -> None:
    filled = found.counts > 0
    axes.bar(
        _middles(found)[filled],
        found.frequency[filled],
        width=_width(found),
        color="C0",
        alpha=0.6,
        edgecolor="C0",
        label="observed",
    )
    axes.plot(found.confidence[filled], found.frequency[filled], marker="o", color="C1", label="mean prediction of each bin")
    axes.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=1, label="perfectly calibrated")


def _middles(found: CalibrationBins) -> Any:
    return (found.edges[:-1] + found.edges[1:]) / 2


def _width(found: CalibrationBins) -> float:
    return 0.94 / len(found.counts)


def _edges(margins: Any) -> Any:
    """Bins of equal width with an edge at 0, so that none has both colours."""
    reach = max(float(np.abs(margins).max()), 1e-9)
    width = 2 * reach / _MARGIN_BINS
    return np.arange(-_MARGIN_BINS // 2, _MARGIN_BINS // 2 + 1) * width


def _check(metrics: PreferenceMetrics) -> None:
    if not metrics.num_pairs:
        raise DataError("there are no scores to draw; evaluate some pairs first")


def _figure(size: tuple[float, float]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _finish(figure: Any, axes: tuple[Any, ...], path: Path, title: str) -> None:
    for one in axes:
        one.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
