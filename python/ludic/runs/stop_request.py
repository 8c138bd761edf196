"""A polite stop: Ctrl-C ends a run after the current step, with everything saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from ludic.errors import StopRequested
from ludic.training.types import SAWBatch, shards_across_ranks


class Interrupted(Exception):
    """The run was stopped, and what was done is saved."""


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
        self._notify("Stopping after this step; once more to stop at once.")


class StoppableSource:
    """A batch source that raises StopRequested once a stop was asked for. Its state is that of the
    source inside."""

    def __init__(self, inner: Any, stop: StopRequest) -> None:
        self._inner, self._stop = inner, stop
        self.overlaps, self.max_lag = getattr(inner, "overlaps", False), getattr(inner, "max_lag", 0)
        """As `OverlappedSource` has them; the trainer reads them."""
        self.shards_across_ranks = shards_across_ranks(inner)

    async def next_batch(self) -> SAWBatch:
        if self._stop:
            raise StopRequested("the run was asked to stop")
        batch: SAWBatch = await self._inner.next_batch()
        return batch

    def state_dict(self) -> dict[str, Any]:
        return dict(self._inner.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)
