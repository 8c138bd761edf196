"""Seconds of each phase of a step, until the end of the run, and of each rank."""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ludic.training import ranks
from ludic.training.loggers.base import Duration

logger = logging.getLogger(__name__)


class PhaseTimer:
    """Adds up wall time under names.

    >>> timer = PhaseTimer()
    >>> with timer.phase("rollout"):
    ...     batch = await source.next_batch()
    >>> timer.stats()
    {'perf/rollout_s': 1.2, 'perf/step_s': 1.3}
    """

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        """`seconds`: the totals to add to, such as the totals of a resumed run."""
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
        """Called at `step`, before the next one. `last`: number of the last step. None if it is not
        known."""
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


SLOW, STEPS_IN_A_ROW = 1.5, 5
"""A rank is named in a warning if it takes this multiple of the median for this number of steps."""


class RankTimes:
    """Compares the seconds that the ranks compute in each step.

    Without a wrapper a rank computes alone until the gradients are summed. The forward and backward
    passes of a wrapped model exchange tensors, so that all ranks appear equally slow.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._last_slow: int | None = None

    def compare(self, seconds: float, device: torch.device | str) -> dict[str, float]:
        """`ranks/wait_s` and `ranks/slowest`, from the seconds of this rank; empty with one rank.
        All ranks call it: one exchange of a number."""
        if not ranks.is_distributed():
            return {}
        own = [0.0] * ranks.world_size()
        own[ranks.rank()] = seconds
        everyone = ranks.sum_over_ranks(own, device)
        self._warn_if_slow(everyone)
        return describe_wait(everyone)

    def _warn_if_slow(self, everyone: Sequence[float]) -> None:
        slow = find_slow(everyone)
        self._in_a_row = self._in_a_row + 1 if slow is not None and slow == self._last_slow else int(slow is not None)
        self._last_slow = slow
        if self._in_a_row == STEPS_IN_A_ROW and slow == ranks.rank():
            logger.error(
                "rank %d, on %s, has taken %.1f times as long as the median of the ranks for %d steps: all wait for it",
                slow,
                socket.gethostname(),
                everyone[slow] / statistics.median(everyone),
                STEPS_IN_A_ROW,
            )


def describe_wait(seconds: Sequence[float]) -> dict[str, float]:
    """The mean over ranks of the time that a rank waits for the slowest, and the number of that.

    Example: [1.0, 3.0] seconds: rank 0 waits 2 s and rank 1 none, so `wait_s` is 1, `slowest` 1.
    """
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return {"ranks/wait_s": seconds[slowest] - statistics.fmean(seconds), "ranks/slowest": float(slowest)}


def find_slow(seconds: Sequence[float]) -> int | None:
    """The slowest rank, if it took more than `SLOW` times the median.

    Example: of two ranks, [1.0, 4.0] has the median 2.5 and names rank 1.
    """
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return slowest if seconds[slowest] > SLOW * statistics.median(seconds) > 0 else None
