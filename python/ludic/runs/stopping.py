"""What stands around the trainer's parts while a recipe runs: a stopwatch, a polite stop, and
labels on what is logged."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ludic.errors import StopRequested
from ludic.training.loggers import TrainingLogger
from ludic.training.types import SAWBatch, shards_across_ranks


class Stopwatch:
    """Wall seconds by phase, added up in `seconds`."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - started)

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


class Interrupted(Exception):
    """A stop was asked for, and what was done is saved."""


class StopRequest:
    """While entered, Ctrl-C or SIGTERM asks for an end after the current step; a second one ends
    at once."""

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


class PhaseLogger:
    """Passes everything on to a JSONL logger with the phase that it belongs to."""

    def __init__(self, inner: Any, phase: str) -> None:
        self._inner, self._phase = inner, phase

    def log(self, step: int, stats: Mapping[str, Any]) -> None:
        self._inner.log(step, {"phase": self._phase, **stats})

    def sync(self) -> None:
        self._inner.sync()


class EveryFew:
    """Passes the first of every `every` steps on, the last, and every evaluation."""

    def __init__(self, inner: TrainingLogger, every: int, last: int) -> None:
        self._inner, self._every, self._last = inner, every, last

    def log(self, step: int, stats: Mapping[str, Any]) -> None:
        if step == self._last or step % self._every == 0 or "eval/step" in stats:
            self._inner.log(step, stats)
