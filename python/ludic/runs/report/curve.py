"""Curves over the steps of a run: as a PNG, and as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise
from pathlib import Path

from ludic.eval.picture import make_figure

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def draw_text_curve(values: Sequence[float], *, width: int = 60, height: int = 8) -> list[str]:
    """The lines of a bar chart. Each column is the mean of consecutive steps. The axis runs from
    0 to the highest value (at least 1); with negative values it runs from the lowest to the
    highest."""
    if not values:
        return []
    buckets = min(width, len(values))
    edges = [round(i * len(values) / buckets) for i in range(buckets + 1)]
    columns = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low = min(0.0, *columns)
    top = max(1.0, *columns) if low == 0 else max(*columns, low + 1e-9)
    least = 0 if low == 0 else 1
    labels = [f"{low + (top - low) * row / height:5.2f}" for row in range(height, -1, -1)]
    room = max(map(len, labels))
    lines = []
    for row, label in zip(range(height, 0, -1), labels, strict=False):
        filled = ((value - low) / (top - low) * height - (row - 1) for value in columns)
        cells = "".join(_EIGHTHS[min(8, max(round(8 * share), least if row == 1 else 0))] for share in filled)
        lines.append(f"{label:>{room}} ┤{cells}")
    foot = f"{' ' * room}  step 1{f'  step {len(values)}':>{max(0, len(columns) - 6)}}"
    return [*lines, f"{labels[-1]:>{room}} ┼{'─' * len(columns)}", foot]


def write_picture(
    path: Path,
    series: Mapping[str, Sequence[float]],
    *,
    marks: Mapping[str, tuple[float, float]],
    title: str,
    measure: str = "rate",
    measured: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> None:
    """Draw the curves of a run to a PNG.

    `series`: label to one value per step. `marks`: label to (before, after), drawn at both ends
    and joined through the points (step, value) that were `measured` under that label. Rates have
    an axis from 0 to 1, unless a value lies outside."""
    figure = make_figure((8, 4.5), layout=None)
    axes = figure.add_subplot()
    steps = max((len(values) for values in series.values()), default=0)
    for label, values in series.items():
        (line,) = axes.plot(range(1, len(values) + 1), values, alpha=0.3, linewidth=1)
        axes.plot(range(1, len(values) + 1), running_mean(values), color=line.get_color(), linewidth=2, label=label)
    points = join_points(marks, measured or {}, steps)
    for marker, (label, course) in zip(cycle("os^Dv"), points.items(), strict=False):
        places, heights = zip(*course, strict=True)
        joined = "dashed" if len(course) > 2 else "none"
        axes.plot(
            places, heights, linestyle=joined, linewidth=1, marker=marker, fillstyle="none", label=label
        )  # open markers do not hide each other
    drawn = [*(value for values in series.values() for value in values), *(value for at in points.values() for _, value in at)]
    drawn = [value for value in drawn if not math.isnan(value)]  # an environment may have no part in a step
    limits = {}
    if measure == "rate":
        low, high = _find_range(drawn)
        limits = {"ylim": (low - 0.03 * (high - low), high + 0.03 * (high - low))}
        measure = measure if (low, high) == (0.0, 1.0) else "value"
    axes.set(xlabel="step", ylabel=measure, title=title, **limits)
    axes.grid(alpha=0.3)
    legend_rows = -(-len(axes.get_legend_handles_labels()[1]) // 2)
    figure.subplots_adjust(left=0.1, right=0.98, top=0.93, bottom=0.13 + 0.05 * legend_rows)
    figure.legend(loc="lower center", ncols=2)  # below the curves, not over them
    figure.savefig(path, dpi=120)


def join_points(
    marks: Mapping[str, tuple[float, float]], measured: Mapping[str, Sequence[tuple[float, float]]], steps: int
) -> dict[str, list[tuple[float, float]]]:
    """Label to points (step, value): the mark before the first step, what was `measured`
    between, and the mark after the last. Labels without marks keep their points."""
    between = {
        label: [(0, before), *(point for point in measured.get(label, ()) if 0 < point[0] < steps), (steps, after)]
        for label, (before, after) in marks.items()
    }
    return between | {label: list(points) for label, points in measured.items() if label not in marks and points}


def running_mean(values: Sequence[float], window: int = 10) -> list[float]:
    """The mean of each value and up to `window - 1` before it. [0, 2, 4] with a window of 2
    gives [0, 1, 3]. What was not measured (NaN) is in no mean."""
    windows = ([value for value in values[max(0, i - window + 1) : i + 1] if not math.isnan(value)] for i in range(len(values)))
    return [sum(known) / len(known) if known else math.nan for known in windows]


def _find_range(values: Sequence[float]) -> tuple[float, float]:
    """0 to 1 if all values lie there, else from the lowest to the highest."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0.0 and high <= 1.0:
        return 0.0, 1.0
    return (low, high) if low < high else (low - 0.5, high + 0.5)
