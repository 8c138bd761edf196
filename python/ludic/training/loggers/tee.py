"""Combines several loggers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

from ludic.training.loggers.base import ClosableLogger, SyncedLogger, TrainingLogger

logger = logging.getLogger(__name__)


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
            if isinstance(each, SyncedLogger):
                each.sync()

    def close(self) -> None:
        for each in self.loggers:
            if isinstance(each, ClosableLogger):
                each.close()

    def __enter__(self) -> TeeLogger:
        for each in self.loggers:
            if isinstance(each, AbstractContextManager):
                self._entered.enter_context(each)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered.__exit__(kind, error, trace)
