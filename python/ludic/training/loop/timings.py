"""Seconds of each phase of a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ludic.training.loggers.base import Duration


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


class TimeLeft:
    """Estimates the seconds until the last step from the wall time of the latest steps, with the
    evaluations and checkpoints between them.

    Example: steps 10 to 30 took 40 s, and step 100 is the last: 70 * 40 / 20 = 140 s.
    """

    WINDOW = 20
    """Number of earlier calls that the estimate reaches back to."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: int | None = None
        self._marks: deque[tuple[int, float]] = deque(maxlen=self.WINDOW + 1)

    def begin(self, step: int, last: int | None) -> None:
        """Called at `step`, before the next one. `last`: number of the last step; None: unknown."""
        self._last = last
        self._marks.clear()
        self._marks.append((step, self._clock()))

    def after(self, step: int) -> Duration | None:
        """The estimate after `step`; None if the last step is unknown."""
        if self._last is None or not self._marks:
            return None
        self._marks.append((step, self._clock()))
        (first, began), (_, now) = self._marks[0], self._marks[-1]
        return Duration(max(0, self._last - step) * (now - began) / (step - first)) if step > first else None
