"""Seconds of each phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Adds up wall time under names.

    >>> timer = PhaseTimer()
    >>> with timer.phase("rollout"):
    ...     batch = await source.next_batch()
    >>> timer.stats()
    {'perf/rollout_s': 1.2, 'perf/step_s': 1.3}
    """

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        """`seconds`: the totals to add to, such as those of a resumed run."""
        self._started = time.perf_counter()
        self._seconds = {} if seconds is None else seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self, name: str) -> float:
        """Seconds of one phase so far."""
        return self._seconds.get(name, 0.0)

    def stats(self) -> dict[str, float]:
        """`perf/<phase>_s` of each phase, and `perf/step_s` since the timer was created."""
        whole = time.perf_counter() - self._started
        return {**{f"perf/{name}_s": seconds for name, seconds in self._seconds.items()}, "perf/step_s": whole}
