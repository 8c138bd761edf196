"""What a run shows while it runs: the live dashboard on a terminal, plain lines without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from ludic.recipes.watch import EveryFew
from ludic.training.loggers import PrintLogger, RichLiveLogger, TrainingLogger

DASHBOARD_KEYS = [
    *("lr", "nll_mean", "kl_actor_policy"),
    *("avg_completion_length", "completion_truncated_rate", "zero_weight_skipped"),
    *("sampled_reward", "greedy_accuracy"),
    *("rollout_s", "batching_s", "forward_backward_s", "optimizer_s", "publish_s", "step_s", "real_tokens", "padded_tokens"),
]


class Screen:
    """Notes between phases, and a logger for each phase."""

    def __init__(self, console: Console, *, every: int) -> None:
        self.console = console
        self._every = every

    def note(self, text: str) -> None:
        """One line."""
        self.console.print(text, highlight=False, markup=False)

    @contextmanager
    def logger(self, title: str, *, keys: list[str], spark_key: str, last_step: int) -> Iterator[TrainingLogger]:
        """`keys` are those of the plain lines; the dashboard shows more, and the course of `spark_key`."""
        if self.console.is_terminal:
            measured = [f"eval/{key.removeprefix('train/')}" for key in keys]
            shown = [*keys, *measured, *DASHBOARD_KEYS]
            with RichLiveLogger(keys=shown, spark_key=spark_key, console=self.console) as live:
                yield live
        else:
            lines = PrintLogger(prefix=f"[{title}]", keys=keys, precision=3)
            yield EveryFew(lines, self._every, last_step)
