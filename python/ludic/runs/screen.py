"""The output of a run: a live dashboard on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from ludic.training.loggers import PrintLogger, RichLiveLogger, TrainingLogger

PROGRESS_KEYS = ["perf/tokens_per_s", "perf/time_left_s"]
"""Shown of each phase, in plain lines too."""
DASHBOARD_KEYS = [
    *("lr", "nll_mean", "entropy", "kl_actor_policy", "reward_std", "frac_reward_zero_std", "avg_completion_length"),
    *("min_completion_length", "max_completion_length", "completion_truncated_rate", "zero_weight_skipped"),
    *("rollout_s", "batching_s", "forward_backward_s", "optimizer_s", "publish_s", "step_s", "real_tokens", "padded_tokens"),
]
MEASURED_KEYS = [
    f"eval/{name}"
    for name in (
        "sampled_reward",
        "greedy_accuracy",
        "loss",
        "perplexity",
        "pairwise_accuracy",
        "mean_margin",
        "rewards/accuracies",
        "rewards/margins",
        "roc_auc",
        "ece",
    )
]
"""The metrics of an evaluation that are shown, in addition to the facts of the task. metrics.jsonl
has all of them."""


class Screen:
    """Notes between phases, and a logger for each phase."""

    def __init__(self, console: Console, *, every: int) -> None:
        self.console = console
        self._every = every
        self._live: RichLiveLogger | None = None

    def note(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, markup=False)

    def show_rates(self, rates: Mapping[str, float]) -> None:
        """Show earlier held-out rates on the dashboard until there are newer ones. Plain lines
        have printed them already."""
        if self._live is not None and rates:
            self._live.log(int(rates.get("eval/step", 0)), rates)

    @contextmanager
    def logger(
        self, title: str, *, keys: list[str], spark_key: str, last_step: int, run_name: str = ""
    ) -> Iterator[TrainingLogger]:
        """`keys` are shown in plain lines; the dashboard shows more, and draws `spark_key`."""
        keys = [*keys, *PROGRESS_KEYS]
        measured = list(dict.fromkeys([*MEASURED_KEYS, *(f"eval/{key.removeprefix('train/')}" for key in keys)]))
        if self.console.is_terminal:
            shown = [*keys, *measured, *DASHBOARD_KEYS]
            dashboard = RichLiveLogger(
                keys=shown, spark_key=spark_key, console=self.console, run_name=run_name, last_step=last_step
            )
            with dashboard as live:
                self._live = live
                try:
                    yield live
                finally:
                    self._live = None
        else:
            lines = PrintLogger(prefix=f"[{title}]", keys=[*keys, *measured], precision=3)
            yield ThinnedLogger(lines, self._every, last_step)


class ThinnedLogger:
    """Passes on every `every`-th step, the last step, and every evaluation."""

    def __init__(self, inner: TrainingLogger, every: int, last: int) -> None:
        self._inner, self._every, self._last = inner, every, last

    def log(self, step: int, stats: Mapping[str, Any]) -> None:
        if step == self._last or step % self._every == 0 or "eval/step" in stats:
            self._inner.log(step, stats)
