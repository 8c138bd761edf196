"""Several loggers as one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType

from ludic.training.loggers.base import SyncedLogger, TrainingLogger

logger = logging.getLogger(__name__)


class TeeLogger:
    """Tells each of its loggers. One that fails is reported and does not keep the others from their
    turn.

    As a context manager it enters and leaves those that are context managers.
    """

    def __init__(self, *loggers: TrainingLogger | None) -> None:
        """None is skipped, so that `TeeLogger(a, b if wanted else None)` reads well."""
        self.loggers: list[TrainingLogger] = [each for each in loggers if each is not None]
        self._entered = ExitStack()

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        for each in self.loggers:
            try:
                each.log(step, stats)
            except Exception:
                logger.exception("%s failed at step %d", type(each).__name__, step)

    def sync(self) -> None:
        """Of those that have something to sync."""
        for each in self.loggers:
            if isinstance(each, SyncedLogger):
                each.sync()

    def close(self) -> None:
        for each in self.loggers:
            if hasattr(each, "close"):
                each.close()

    def __enter__(self) -> TeeLogger:
        for each in self.loggers:
            if hasattr(each, "__enter__"):
                self._entered.enter_context(each)  # type: ignore[arg-type]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered.__exit__(kind, error, trace)
