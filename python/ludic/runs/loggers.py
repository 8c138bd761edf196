"""Loggers that wrap another one: one adds the phase, one passes on only some of the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludic.training.loggers import TrainingLogger


class PhaseLogger:
    """Adds the phase of the run, and its `header`, to every record of the `JSONLLogger` that it
    wraps."""

    def __init__(self, inner: Any, phase: str, header: Mapping[str, Any] | None = None) -> None:
        self._inner, self._added = inner, {"phase": phase, **(header or {})}

    def log(self, step: int, stats: Mapping[str, Any]) -> None:
        self._inner.log(step, {**self._added, **stats})

    def sync(self) -> None:
        self._inner.sync()


class ThinnedLogger:
    """Passes on every `every`-th step, the last step, and every evaluation."""

    def __init__(self, inner: TrainingLogger, every: int, last: int) -> None:
        self._inner, self._every, self._last = inner, every, last

    def log(self, step: int, stats: Mapping[str, Any]) -> None:
        if step == self._last or step % self._every == 0 or "eval/step" in stats:
            self._inner.log(step, stats)
