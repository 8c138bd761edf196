"""How speeds are compared: all contenders of a contest take turns in one process, and a ratio is
taken within each round.

A ratio to the reference in the same round survives a machine that is slower in one round than in
the next. What a contender gives is compared with the reference's before anything is timed. The
clock is the processor time of this thread: what other processes take does not count, and nothing
here sleeps or has threads of its own.
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
    """Takes what it gives and what the reference gives; raises when they differ. None where
    there is nothing to compare."""
    repeats: int = 1
    """Runs within one timing: more for work of microseconds."""
    cold: bool = False
    """Evict the inputs from the caches before each timing."""


@dataclass(frozen=True)
class Contest:
    """Contenders for the same work; the first is the reference."""

    title: str
    units: int
    """Of work in one run, for example tokens: times are printed in nanoseconds a unit."""
    unit: str
    contenders: Sequence[Contender]


@dataclass
class Result:
    """Of one contender: one time and one ratio a round."""

    name: str
    unit_ns: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    @property
    def median_ns(self) -> float:
        return statistics.median(self.unit_ns)

    @property
    def ratio(self) -> float:
        """How many times the speed of the reference: the median over rounds."""
        return statistics.median(self.ratios)


def hold(contest: Contest, rounds: int = 7) -> list[Result]:
    """Checks all contenders, then times each once a round, in an order that shifts by one from
    round to round."""
    _check(contest)
    results = [Result(contender.name) for contender in contest.contenders]
    for turn in range(rounds):
        order = np.roll(np.arange(len(results)), -turn)
        seconds = {index: _timed(contest.contenders[index]) for index in order.tolist()}
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


def _timed(contender: Contender) -> float:
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


def markdown(contest: Contest, results: Sequence[Result]) -> str:
    """A table: median and least nanoseconds a unit, and the median ratio."""
    rows = [f"| {result.name} | {result.median_ns:.3g} | {min(result.unit_ns):.3g} | {result.ratio:.3g}x |" for result in results]
    head = [f"### {contest.title}", "", f"| contender | ns/{contest.unit} | least | speed |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])
