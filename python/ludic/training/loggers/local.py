"""Loggers without a service: a JSONL file, printed lines, several loggers at a time, and metrics
under other libraries' names."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from ludic.training.loggers.base import ClosingLogger, Duration, Percent, TrainingLogger, select_stats, sync_log

logger = logging.getLogger(__name__)


class JSONLLogger(ClosingLogger):
    """Appends `{"step": ..., <statistics>}` to a file and flushes it after each line. Values that
    are not finite become null.

    >>> with JSONLLogger("runs/a/metrics.jsonl") as logger:
    ...     logger.log(1, {"train/loss": 0.5})
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            is_cut_short = self.path.is_file() and not _ends_with_a_line(self.path)
            self._file = self.path.open("a", encoding="utf-8")
            self._file.write("\n" if is_cut_short else "")  # an incomplete last line, left by a full disk, gets its line break
        record: dict[str, float | None] = {"step": step}
        for key, value in stats.items():
            record[key] = None if isinstance(value, float) and not math.isfinite(value) else value
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Flush all lines to disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _ends_with_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"", b"\n")


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


class TeeLogger:
    """Passes the statistics to each of its loggers. If one raises, the error is logged and the
    others still get the statistics.

    As a context manager, it enters and exits the loggers that are context managers.
    """

    def __init__(self, *loggers: TrainingLogger | None) -> None:
        """None is skipped, so `TeeLogger(a, b if condition else None)` works."""
        self.loggers: list[TrainingLogger] = [each for each in loggers if each is not None]
        self._entered = ExitStack()

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        for each in self.loggers:
            try:
                each.log(step, stats)
            except Exception:
                logger.exception("%s failed at step %d", type(each).__name__, step)

    def sync(self) -> None:
        """Sync the loggers that can be synced."""
        for each in self.loggers:
            sync_log(each)

    def close(self) -> None:
        for each in self.loggers:
            close = getattr(each, "close", None)
            if close is not None:
                close()

    def __enter__(self) -> TeeLogger:
        for each in self.loggers:
            if isinstance(each, AbstractContextManager):
                self._entered.enter_context(each)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


_BUCKETS = ("0-32", "33-64", "65-128", "129-256", "257+")
"""Ranges of tokens of `reference/kl_bucket`."""
DOCUMENT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "train/beta": "train/kl_coeff",
        "reference/kl": "train/kl",
        "train/frac_zero_signal": "train/frac_reward_zero_std",
        "train/lr": "train/learning_rate",
        "train/avg_sampled_reward": "train/reward",
        "train/avg_completion_length": "train/completions/mean_length_sampled",
        "train/min_completion_length": "train/completions/min_length_sampled",
        "train/max_completion_length": "train/completions/max_length_sampled",
        "train/completion_truncated_rate": "train/completions/clipped_frac",
        "train/clip_frac": "train/clip_ratio",
        "train/seed/seeded_frac": "train/seed/seed_aug_frac",
        "train/seed/pred_acc": "train/seed/seed_pred_acc",
        "train/seed/diversity_l2": "train/seed/seed_diversity_l2",
        "train/seed/plain_entropy": "train/seed/entropy/orig",
        "train/seed/seeded_entropy": "train/seed/entropy/seed_aug",
        "eval_seed/pass_at_n": "eval_seed/pass_at_1",
        "eval/sampled_reward": "eval/mean_reward",
        "train/policy/loss": "train/loss/policy",
        "train/clip/loss": "train/loss/clip",
        "train/reference_kl/loss": "train/loss/weighted_kl",
        "train/seed/loss": "train/loss/seed",
        "reference/sequence_kl": "train/loss/kl",
        **{f"reference/kl_bucket/{tokens}": f"train/kl_per_token_bucket/{tokens}" for tokens in _BUCKETS},
    }
)
"""Our names of metrics -> names of MaxEnt-GRPO's training guide, where they differ."""


class AliasLogger:
    """Logs some metrics under a second name too. A metric that a step does not have has no alias
    in it either, and a name that the step has already is never replaced."""

    def __init__(self, inner: TrainingLogger, aliases: Mapping[str, str] = DOCUMENT_NAMES) -> None:
        """`aliases`: our name -> the other one."""
        self._inner, self._aliases = inner, dict(aliases)

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        also = {other: stats[name] for name, other in self._aliases.items() if name in stats and other not in stats}
        self._inner.log(step, {**stats, **also})

    def sync(self) -> None:
        sync_log(self._inner)
