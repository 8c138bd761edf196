"""A live dashboard in the terminal: panels for train, eval and perf statistics, side by side or
stacked in a narrow terminal, and a sparkline of one metric."""

from __future__ import annotations

import math
import sys
import warnings
from collections import deque
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ludic.training.loggers.base import ClosingLogger, Duration, Percent, select_stats, without_prefix

SECTIONS = {"train": "green", "eval": "magenta", "perf": "cyan"}
HIDDEN = frozenset({"phase", "train_step", "eval_step", "train/step", "eval/step"})
BARS = "▁▂▃▄▅▆▇█"
NARROW = 72
"""Terminal width, in columns, below which the panels are stacked, since keys would not fit side by
side."""


class RichLiveLogger(ClosingLogger):
    """Shows the latest statistics and a sparkline. Use it as a context manager, or let the first
    `log` start it.

    >>> with RichLiveLogger(keys=["loss"], spark_key="avg_total_reward") as logger:
    ...     Trainer(..., train_logger=logger).train_sync(num_steps=100)
    """

    def __init__(
        self,
        *,
        keys: Sequence[str] | None = None,
        spark_key: str = "avg_total_reward",
        history: int = 100,
        spark_window: int = 50,
        precision: int = 4,
        console: Console | None = None,
        live: Live | None = None,
        run_name: str = "",
        last_step: int | None = None,
    ) -> None:
        """`keys`: the statistics to display, with or without prefix. None means all. `spark_key`:
        the metric of the sparkline; the last `history` values are stored, the last `spark_window`
        drawn. `run_name` is in the title of that panel, `last_step` in the train panel's."""
        self.keys, self.spark_key = keys, spark_key
        self.spark_window, self.precision = spark_window, precision
        self.history_vals: deque[float] = deque(maxlen=history)
        self.console = console or (live.console if live is not None else Console())
        self._live = live
        self.run_name, self.last_step = run_name, last_step
        self._owns_live = False
        self._latest: dict[str, dict[str, float]] = {section: {} for section in SECTIONS}
        self._step = 0
        self._bars_disabled = False

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        value = stats.get(self.spark_key, stats.get(f"train/{self.spark_key}"))
        if value is not None and math.isfinite(value):
            self.history_vals.append(float(value))
        for section in SECTIONS:  # an evaluation does not clear the training's numbers, and vice versa
            values = {key: value for key, value in stats.items() if find_section(key) == section}
            if values:
                self._latest[section] = values
                self._step = step if section == "train" else self._step or step
        self.start()
        assert self._live is not None
        latest = {key: value for section in self._latest.values() for key, value in section.items()}
        self._live.update(self.render(self._step, latest), refresh=True)

    def start(self) -> None:
        """Start the live display, unless it is already running."""
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, transient=False)
            self._owns_live = True
        if not self._live.is_started:
            self._live.start()
            self._owns_live = True
        bars = sys.modules.get("transformers.utils.logging")  # progress bars would break the display
        if bars is not None and not self._bars_disabled and bars.is_progress_bar_enabled():
            bars.disable_progress_bar()
            self._bars_disabled = True

    def close(self) -> None:
        """Stop the live display; its last frame remains visible."""
        if self._live is not None and self._owns_live:
            self._live.stop()
            self._live, self._owns_live = None, False
        if self._bars_disabled:
            with warnings.catch_warnings():  # transformers warns if an environment variable disables the bars
                warnings.simplefilter("ignore")
                sys.modules["transformers.utils.logging"].enable_progress_bar()
            self._bars_disabled = False

    def __enter__(self) -> RichLiveLogger:
        self.start()
        return self

    def render(self, step: int, stats: Mapping[str, float]) -> RenderableType:
        """Return the dashboard as a rich renderable."""
        selected = list(stats.items()) if self.keys is None else select_stats(stats, self.keys)
        visible = [(key, value) for key, value in selected if key not in HIDDEN]
        shown = {name: [(without_prefix(key), value) for key, value in visible if find_section(key) == name] for name in SECTIONS}
        titles = {name: self._title(name, step, stats) for name in shown}
        if self.console.width < NARROW:
            panels = [self._section(name, rows, titles[name]) for name, rows in shown.items() if rows or name == "train"]
            return Group(self._sparkline_panel(), *panels)
        columns = Table.grid(expand=True, padding=(0, 1))
        for _ in SECTIONS:
            columns.add_column(ratio=1)
        height = max(1, *map(len, shown.values())) + 2
        columns.add_row(*(self._section(name, rows, titles[name], height) for name, rows in shown.items()))
        return Group(columns, self._sparkline_panel())

    def _section(self, name: str, shown: Sequence[tuple[str, float]], title: str, height: int | None = None) -> Panel:
        rows = Table.grid(expand=True, padding=(0, 1))
        rows.add_column(style="dim", no_wrap=True, overflow="ellipsis", ratio=1)
        rows.add_column(justify="right", no_wrap=True, style="bold")
        for key, value in shown:
            rows.add_row(key, self._number(value))
        body: RenderableType = rows if shown else Text("nothing yet", style="dim italic")
        return Panel(body, title=title, border_style=SECTIONS[name], box=box.ROUNDED, height=height)

    def _title(self, name: str, step: int, stats: Mapping[str, float]) -> str:
        if name == "perf":
            return name
        at = stats.get(f"{name}/step", step if name == "train" else None)
        of = f" of {self.last_step}" if name == "train" and self.last_step is not None else ""
        return name if at is None else f"{name} · step {int(at)}{of}"

    def _number(self, value: float) -> str:
        if not math.isfinite(value):
            return str(value)
        if isinstance(value, Duration):
            return value.as_text()
        if isinstance(value, Percent):
            return value.as_percentage(max(1, self.precision - 2))
        value = float(value)
        if value.is_integer() and abs(value) >= 1:
            return f"{int(value):,}"
        small = value != 0 and abs(value) < 10**-self.precision
        return f"{value:.{max(self.precision - 2, 1)}e}" if small else f"{value:,.{self.precision}f}"

    def _sparkline_panel(self) -> Panel:
        window = list(self.history_vals)[-self.spark_window :]
        body = Text(no_wrap=True, overflow="crop")
        if not window:
            body.append("waiting for the first value", style="dim italic")
        else:
            body.append(sparkline(window), style="yellow")
            body.append(f"  {self._number(window[-1])}", style="bold")
            low, high = self._number(min(window)), self._number(max(window))
            body.append(f"\nlow {low}   high {high}   last {len(window)} of {len(self.history_vals)} values", style="dim")
        title = Text(" · ".join(filter(None, (self.run_name, self.spark_key))))
        return Panel(body, title=title, border_style="yellow", box=box.ROUNDED, title_align="left")


def find_section(key: str) -> str:
    """Return the section of a statistic; without a prefix it is `train`."""
    prefix = key.partition("/")[0]
    if prefix in SECTIONS:
        return prefix
    return "eval" if key.startswith("eval_") else "perf" if key.startswith("gpu_") else "train"


def sparkline(values: Sequence[float]) -> str:
    """Return one bar per value, scaled from the minimum to the maximum. If all values are equal,
    the bars have half height.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    low, high = min(values), max(values)
    if high == low:
        return BARS[len(BARS) // 2 - 1] * len(values)
    top = len(BARS) - 1
    return "".join(BARS[math.floor((value - low) / (high - low) * top + 0.5)] for value in values)
