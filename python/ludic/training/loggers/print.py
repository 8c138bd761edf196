"""Prints statistics as plain lines on standard output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ludic.training.loggers.base import Duration, Percent, select_stats


class PrintLogger:
    """Prints `[trainer] step=3 train/loss=0.1235 ...`, a few statistics per line.

    >>> PrintLogger(keys=["loss"], precision=2).log(3, {"train/loss": 0.125})
    [trainer] step=3 train/loss=0.12
    """

    def __init__(
        self,
        *,
        prefix: str = "[trainer]",
        keys: Sequence[str] | None = None,
        precision: int = 4,
        max_items_per_line: int = 6,
    ) -> None:
        """`keys`: the statistics to print, in this order, with or without prefix. None means all,
        sorted. `precision`: number of decimals; percentages have two fewer."""
        self.prefix, self.keys = prefix, keys
        self.precision, self.max_items_per_line = precision, max(1, max_items_per_line)

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        shown = select_stats(stats, self.keys) if self.keys is not None else sorted(stats.items())
        items = [f"{key}={self._text(value)}" for key, value in shown]
        head = f"{self.prefix} step={step}"
        rows = [items[at : at + self.max_items_per_line] for at in range(0, len(items), self.max_items_per_line)]
        indent = " " * len(self.prefix)
        lines = [" ".join([head if at == 0 else indent, *row]) for at, row in enumerate(rows or [[]])]
        print("\n".join(lines), flush=True)

    def _text(self, value: object) -> str:
        if isinstance(value, Duration):
            return value.as_text()
        if isinstance(value, Percent):
            return value.as_percentage(max(0, self.precision - 2))
        return f"{value:.{self.precision}f}" if isinstance(value, float) else str(value)
