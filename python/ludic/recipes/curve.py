"""The reward curve: as a PNG, and as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def text_curve(values: Sequence[float], *, width: int = 60, height: int = 8) -> list[str]:
    """Lines of a bar chart from 0 to the highest value (at least 1), each column the mean of its share of the steps."""
    if not values:
        return []
    columns = _bucket_means(values, min(width, len(values)))
    top = max(1.0, max(columns))
    lines = []
    for row in range(height, 0, -1):
        cells = "".join(_EIGHTHS[_clamp(round(8 * (value / top * height - (row - 1))))] for value in columns)
        lines.append(f"{top * row / height:5.2f} ┤{cells}")
    return [*lines, f"{0:5.2f} ┼{'─' * len(columns)}", f"       step 1{f'  step {len(values)}':>{max(0, len(columns) - 6)}}"]


def write_picture(
    path: Path,
    series: Mapping[str, Sequence[float]],
    *,
    marks: Mapping[str, tuple[float, float]],
    title: str,
    measure: str = "rate",
) -> None:
    """`series`: label to one value a step. `marks`: label to (before, after), drawn at the two ends. Rates are shown from 0 to 1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = max((len(values) for values in series.values()), default=0)
    for label, values in series.items():
        (line,) = axes.plot(range(1, len(values) + 1), values, alpha=0.3, linewidth=1)
        axes.plot(range(1, len(values) + 1), running_mean(values), color=line.get_color(), linewidth=2, label=label)
    for label, (before, after) in marks.items():
        axes.plot([0, steps + 1], [before, after], linestyle="none", marker="o", label=label)
    low, high = _range(
        [*(value for values in series.values() for value in values), *(v for pair in marks.values() for v in pair)]
    )
    limits = {"ylim": (low - 0.03 * (high - low), high + 0.03 * (high - low))} if measure == "rate" else {}
    axes.set(xlabel="step", ylabel=measure, title=title, **limits)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right" if measure == "rate" else "upper right")
    figure.savefig(path, dpi=120)


def running_mean(values: Sequence[float], window: int = 10) -> list[float]:
    """Mean of each value with up to `window - 1` before it."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """0 to 1, and whatever lies beyond."""
    return min([0.0, *values]), max([1.0, *values])


def _bucket_means(values: Sequence[float], buckets: int) -> list[float]:
    edges = [round(i * len(values) / buckets) for i in range(buckets + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _clamp(eighths: int) -> int:
    return min(8, max(0, eighths))
