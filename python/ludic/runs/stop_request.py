"""Ctrl-C ends a run after the current step, with everything saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from ludic.errors import StopRequested
from ludic.training.batching.source import PENDING_PATIENCE_S, BatchSourceBase, as_batch_source
from ludic.training.types import BatchSource, SAWBatch


class Interrupted(Exception):
    """The run was stopped by a request, and its progress is saved."""


class StopRequest:
    """While entered, the first Ctrl-C or SIGTERM makes it true and the second raises
    KeyboardInterrupt."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.signum: int | None = None
        self._notify = notify
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signum is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self:
            raise KeyboardInterrupt
        self.signum = signum
        self._notify("Stopping after this step; press Ctrl-C again to stop at once.")


class StoppableSource(BatchSourceBase):
    """A batch source that raises StopRequested once a stop was requested. Its state is that of
    the inner source."""

    def __init__(self, source: BatchSource, stop: StopRequest) -> None:
        inner = self._inner = as_batch_source(source)
        self._stop = stop
        self.overlaps, self.max_lag = inner.overlaps, inner.max_lag
        self.shards_across_ranks, self.pairs_incomplete = inner.shards_across_ranks, inner.pairs_incomplete
        self.divided_by_trainer = inner.divided_by_trainer

    async def next_batch(self) -> SAWBatch:
        if self._stop:
            raise StopRequested("the run was asked to stop")
        return await self._inner.next_batch()

    def state_dict(self) -> dict[str, Any] | None:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)

    async def finish_pending(self, timeout_s: float = PENDING_PATIENCE_S) -> None:
        await self._inner.finish_pending(timeout_s)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def unshard(self) -> None:
        self._inner.unshard()
        self.shards_across_ranks = self._inner.shards_across_ranks
