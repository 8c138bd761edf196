"""Plots of measurements: shares with their intervals and the pass@k curve, the calibration of
preference scores, and the margins between the two responses of a pair."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ludic.errors import DataError
from ludic.eval.statistics import Interval
from ludic.eval.tally import Measurement
from ludic.training.classification_metrics import PreferenceMetrics, margins_in_both_orders, percentiles

_MARGIN_BINS = 40


def make_figure(size: tuple[float, float], *, layout: Literal["constrained"] | None = "constrained") -> Any:
    """An empty figure that needs no display. `size` is (width, height) in inches; `layout` is
    matplotlib's: constrained, or None for fixed margins."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def draw_measurements(path: Path, measurements: Mapping[str, Measurement], *, title: str) -> None:
    """Write a PNG. `measurements`: label -> measurement; several labels are compared."""
    figure = make_figure((9, 4))
    shares, curve = figure.subplots(1, 2)
    for position, (label, measurement) in enumerate(measurements.items()):
        colour = f"C{position}"
        offset = 0.8 * (position - (len(measurements) - 1) / 2) / len(measurements)
        for number, share in enumerate(_collect_shares(measurement).values()):
            low, high = share.value if share.low is None else share.low, share.value if share.high is None else share.high
            reach = [[max(0.0, share.value - low)], [max(0.0, high - share.value)]]
            shares.bar(number + offset, share.value, width=0.72 / len(measurements), color=colour, alpha=0.6)
            shares.errorbar(number + offset, share.value, yerr=reach, color="black", capsize=4, linewidth=1)
        _draw_curve(curve, measurement, colour=colour, label=label)
    confidence = {f"{measurement.confidence:.0%}" for measurement in measurements.values()}
    names = [name.replace("_", " ") for name in _collect_shares(next(iter(measurements.values())))]
    shares.set_xticks(range(len(names)), names)
    shares.set(
        ylim=(0, 1.03), ylabel="share of answers", title=f"accuracy, {' and '.join(sorted(confidence))} intervals by problem"
    )
    curve.set(ylim=(0, 1.03), xlabel="k, answers to a problem", ylabel="at least one right", title="pass@k")
    if len(measurements) > 1:
        curve.legend(loc="best")
    _save(figure, (shares, curve), path, title)


def _collect_shares(measurement: Measurement) -> dict[str, Interval]:
    """The values between 0 and 1."""
    facts = {name: interval for name, interval in measurement.also.items() if name in measurement.shares}
    return {"accuracy": measurement.accuracy, **facts}


def _draw_curve(axes: Any, measurement: Measurement, *, colour: str, label: str) -> None:
    ks = list(measurement.pass_at_k)
    intervals = list(measurement.pass_at_k.values())
    axes.plot(ks, [interval.value for interval in intervals], marker="o", color=colour, label=label)
    axes.fill_between(
        ks, [interval.low for interval in intervals], [interval.high for interval in intervals], color=colour, alpha=0.15
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])


def draw_reliability(path: Path, metrics: PreferenceMetrics, *, title: str) -> None:
    """Write a reliability diagram of the scores in `metrics` as PNG: the observed frequency for
    each bin of predicted probabilities, the diagonal of perfect calibration, and below the
    number of predictions in each bin. Raises DataError without scores."""
    _check_has_scores(metrics)
    figure = make_figure((5.4, 6))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    bins = metrics.calibration()
    middles, width = (bins.edges[:-1] + bins.edges[1:]) / 2, 0.94 / len(bins.counts)
    filled = bins.counts > 0
    observed = bins.frequency[filled]
    upper.bar(middles[filled], observed, width=width, color="C0", alpha=0.6, edgecolor="C0", label="observed")
    upper.plot(bins.confidence[filled], observed, marker="o", color="C1", label="mean prediction of each bin")
    upper.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=1, label="perfectly calibrated")
    lower.bar(middles, bins.counts, width=width, color="C0", alpha=0.6)
    error = metrics.compute()["ece"]
    upper.set(xlim=(0, 1), ylim=(0, 1.03), ylabel="how often it is preferred", title=f"expected calibration error {error:.3f}")
    orders = ", each in both orders" if metrics.both_orders else ""
    lower.set(xlabel="probability that a response is preferred, as stated", ylabel="predictions")
    lower.set_title(f"{metrics.num_pairs:,} pairs{orders}", fontsize="medium")
    upper.legend(loc="upper left")
    _save(figure, (upper, lower), path, title)


def draw_margins(path: Path, metrics: PreferenceMetrics, *, title: str) -> None:
    """Write a histogram of the margins (score of the preferred response minus the other's) as PNG,
    with margins below 0 in another colour. A pair whose label is a probability counts in both
    orders, weighted. Raises DataError without scores."""
    _check_has_scores(metrics)
    chosen, rejected, labels = metrics.scores
    margins, weights = margins_in_both_orders(chosen - rejected, labels)
    figure = make_figure((7, 4))
    axes = figure.subplots()
    edges = _make_bin_edges(margins)
    for part, colour, name in ((margins > 0, "C0", "right"), (margins < 0, "C3", "wrong")):
        share = weights[part].sum() / weights.sum()
        axes.hist(margins[part], bins=edges, weights=weights[part], color=colour, alpha=0.6, label=f"{name}: {share:.1%}")
    median = percentiles(chosen - rejected, labels)["margin_p50"]
    axes.axvline(0.0, color="black", linewidth=1)
    axes.axvline(median, color="black", linewidth=1, linestyle="--", label=f"median {median:.2f}")
    axes.set(xlabel="score of the preferred response minus the other's", ylabel="pairs", title=f"{metrics.num_pairs:,} pairs")
    axes.legend(loc="best")
    _save(figure, (axes,), path, title)


def _make_bin_edges(margins: Any) -> Any:
    """Edges of bins of equal width with an edge at 0, so that no bin has both colours."""
    reach = max(float(np.abs(margins).max()), 1e-9)
    width = 2 * reach / _MARGIN_BINS
    return np.arange(-_MARGIN_BINS // 2, _MARGIN_BINS // 2 + 1) * width


def _check_has_scores(metrics: PreferenceMetrics) -> None:
    if not metrics.num_pairs:
        raise DataError("there are no scores to draw; evaluate some pairs first")


def _save(figure: Any, axes: tuple[Any, ...], path: Path, title: str) -> None:
    for one in axes:
        one.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
