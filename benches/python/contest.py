"""Compares speeds: all contenders of a contest take turns in one process, and each is compared with
the reference of the same round.

This ratio does not change if the machine is slower in one round than in another. The result of each
contender is compared with that of the reference before anything is timed. The clock is the
processor time of this thread, which excludes other processes; nothing here sleeps or starts
threads.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Run = Callable[[], Any]
_FLUSH = np.zeros(96 * 2**20 // 8)


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a contest."""

    name: str
    run: Run
    check: Callable[[Any, Any], None] | None = None
    """Takes the result of `run` and that of the reference; raises if they differ. None if there is
    nothing to compare."""
    repeats: int = 1
    """The number of runs in one timing: more for work that takes microseconds."""
    cold: bool = False
    """Whether to evict the inputs from the caches before each timing."""


@dataclass(frozen=True)
class Contest:
    """Contenders for the same work; the first is the reference."""

    title: str
    units: int
    """The number of units of work in one run. Times are printed in nanoseconds per unit."""
    unit: str
    """For example "token"."""
    contenders: Sequence[Contender]


@dataclass
class Result:
    """The times and ratios of one contender, one per round."""

    name: str
    unit_ns: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    @property
    def median_ns(self) -> float:
        return statistics.median(self.unit_ns)

    @property
    def ratio(self) -> float:
        """The speed relative to the reference: the median over rounds."""
        return statistics.median(self.ratios)


def run_contest(contest: Contest, rounds: int = 7) -> list[Result]:
    """Check all contenders, then time each once per round, in an order that shifts by one from
    round to round."""
    _check(contest)
    results = [Result(contender.name) for contender in contest.contenders]
    for turn in range(rounds):
        order = np.roll(np.arange(len(results)), -turn)
        seconds = {index: _time(contest.contenders[index]) for index in order.tolist()}
        for index, result in enumerate(results):
            result.unit_ns.append(seconds[index] * 1e9 / contest.units)
            result.ratios.append(seconds[0] / seconds[index])
    return results


def _check(contest: Contest) -> None:
    want = contest.contenders[0].run()
    for contender in contest.contenders[1:]:
        got = contender.run()
        if contender.check is not None:
            contender.check(got, want)


def _time(contender: Contender) -> float:
    """Seconds of one run."""
    if contender.cold:
        _FLUSH.sum()
    gc.collect()
    gc.disable()
    begin = time.thread_time()
    for _ in range(contender.repeats):
        contender.run()
    seconds = (time.thread_time() - begin) / contender.repeats
    gc.enable()
    return seconds


def format_table(contest: Contest, results: Sequence[Result]) -> str:
    """A markdown table: the median and the least nanoseconds per unit, and the median ratio."""
    rows = [f"| {result.name} | {result.median_ns:.3g} | {min(result.unit_ns):.3g} | {result.ratio:.3g}x |" for result in results]
    head = [f"### {contest.title}", "", f"| contender | ns/{contest.unit} | least | speed |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])
