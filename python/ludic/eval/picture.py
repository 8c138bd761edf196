"""Plots measurements: shares with their intervals, and the pass@k curve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ludic.eval.intervals import Interval
from ludic.eval.tally import Measurement


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
        _draw_bars(shares, _collect_shares(measurement), colour=colour, offset=offset, width=0.8 / len(measurements))
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
    for axes in (shares, curve):
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _collect_shares(measurement: Measurement) -> dict[str, Interval]:
    """The values between 0 and 1."""
    facts = {name: interval for name, interval in measurement.also.items() if name in measurement.shares}
    return {"accuracy": measurement.accuracy, **facts}


def _draw_bars(axes: Any, shares: Mapping[str, Interval], *, colour: str, offset: float, width: float) -> None:
    for position, share in enumerate(shares.values()):
        low, high = share.value if share.low is None else share.low, share.value if share.high is None else share.high
        reach = [[max(0.0, share.value - low)], [max(0.0, high - share.value)]]
        axes.bar(position + offset, share.value, width=width * 0.9, color=colour, alpha=0.6)
        axes.errorbar(position + offset, share.value, yerr=reach, color="black", capsize=4, linewidth=1)


def _draw_curve(axes: Any, measurement: Measurement, *, colour: str, label: str) -> None:
    ks = list(measurement.pass_at_k)
    intervals = list(measurement.pass_at_k.values())
    axes.plot(ks, [interval.value for interval in intervals], marker="o", color=colour, label=label)
    axes.fill_between(
        ks, [interval.low for interval in intervals], [interval.high for interval in intervals], color=colour, alpha=0.15
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
