"""Which sample is at which position, without end: passes over data, shares of several sources."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from random import Random
from typing import Any, NamedTuple

from ludic.errors import ConfigError


class _Stretch(NamedTuple):
    """Consecutive passes of one length."""

    first_position: int
    first_pass: int
    length: int


class Passes:
    """Passes over `length` samples. The order of a pass depends only on its number, so a position
    is all that a checkpoint has to save, and any position can be read at any time.

    >>> passes = Passes(3, lambda number: [0, 1, 2] if number == 0 else [2, 0, 1])
    >>> [passes.at(position) for position in range(5)]
    [0, 1, 2, 2, 0]

    `grow` lets the passes that have not begun have more samples. Example: 3 samples become 5 at
    position 4, the second of pass 1; pass 1 ends at position 6, and pass 2 has positions 6 to 10.
    """

    def __init__(self, length: int, order: Callable[[int], Sequence[int]] | None = None) -> None:
        """`order` returns the order of a pass, counted from 0. With None every pass is in the order
        of the data.

        Saved positions are only valid for one order. Each caller therefore keeps the random stream
        that its checkpoints were written with.
        """
        if length < 1:
            raise ConfigError(f"there are {length} samples to pass over; at least one is needed")
        self._order = order
        self._stretches = [_Stretch(0, 0, length)]
        self._number = -1
        self._current: Sequence[int] = ()
        self.position = 0
        """What `take` returns next."""

    def at(self, position: int) -> int:
        """The sample at a position. Example: with 3 samples, position 7 is the second of pass 2,
        since 7 = 2 * 3 + 1; if the order of pass 2 is [2, 0, 1], it is sample 0."""
        number, offset = self.locate(position)
        if self._order is None:
            return offset
        if number != self._number:
            self._number, self._current = number, self._order(number)
        return int(self._current[offset])

    def take(self, n: int) -> list[int]:
        """The next `n` samples, over any number of passes."""
        taken = [self.at(position) for position in range(self.position, self.position + n)]
        self.position += n
        return taken

    def locate(self, position: int) -> tuple[int, int]:
        """(pass, offset in it) of a position. Example: 7 with 3 samples is (2, 1)."""
        if position < 0:
            raise IndexError(f"position {position} lies before the first pass")
        stretch = self._stretches[bisect_right(self._stretches, position, key=lambda one: one.first_position) - 1]
        passes, offset = divmod(position - stretch.first_position, stretch.length)
        return stretch.first_pass + passes, offset

    def start_of(self, number: int) -> int:
        """The position at which a pass begins. Example: pass 2 of 3 samples begins at 6."""
        stretch = self._stretch_of(number)
        return stretch.first_position + (number - stretch.first_pass) * stretch.length

    def length_of(self, number: int) -> int:
        """The number of samples of a pass."""
        return self._stretch_of(number).length

    def _stretch_of(self, number: int) -> _Stretch:
        return self._stretches[bisect_right(self._stretches, number, key=lambda one: one.first_pass) - 1]

    def grow(self, length: int) -> None:
        """Give every pass that has not begun `length` samples. What lies before `position` stays
        where it is."""
        last = self._stretches[-1].length
        if length < last:
            raise ConfigError(f"{last} samples cannot become {length}; passes only grow")
        number, offset = self.locate(self.position)
        first = number + (offset > 0)
        if length == last:
            return
        start = self.start_of(first)
        self._stretches = [one for one in self._stretches if one.first_pass < first] + [_Stretch(start, first, length)]
        self._number = -1

    def state_dict(self) -> dict[str, Any]:
        """The position, and (first pass, length) of each stretch of passes of one length."""
        return {"position": self.position, "lengths": [[one.first_pass, one.length] for one in self._stretches]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position in `state`. Raises ConfigError if the number of samples differs:
        load into passes of the old number, then `grow`."""
        stretches: list[_Stretch] = []
        for first_pass, length in state["lengths"]:
            before = stretches[-1] if stretches else _Stretch(0, 0, 0)
            start = before.first_position + (first_pass - before.first_pass) * before.length
            stretches.append(_Stretch(start, first_pass, length))
        if stretches[-1].length != self._stretches[-1].length:
            raise ConfigError(f"{stretches[-1].length} samples were saved, not {self._stretches[-1].length}; give the same data")
        self._stretches, self.position, self._number = stretches, int(state["position"]), -1


class Shares:
    """Which source each position belongs to; their weights may change at some positions.

    The number of positions of a source among the first n differs from the sum of its shares there
    by at most 1 - 1 / (2 m - 2), for m sources and every n: Tijdeman, "The chairman assignment
    problem" (Discrete Mathematics 32, 1980). All arithmetic is of whole numbers, so that a position
    is all that a checkpoint has to save.

    >>> shares = Shares([{0: Fraction(2)}, {0: Fraction(1)}])
    >>> [shares.at(position) for position in range(6)]
    [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
    """

    def __init__(self, weights: Sequence[Mapping[int, Fraction]]) -> None:
        """`weights`: for each source its weights by the position at which they begin; 0 before the
        first. Raises ConfigError for a position at which all weights are 0."""
        self._starts = sorted({0, *(start for each in weights for start in each)})
        current, shares = [Fraction()] * len(weights), list[list[Fraction]]()
        for start in self._starts:
            current = [each.get(start, weight) for each, weight in zip(weights, current, strict=True)]
            if not any(current):
                raise ConfigError(f"all weights are 0 from {start} on; give one of them a weight above 0")
            shares.append([weight / sum(current) for weight in current])
        slack = max(1, 2 * len(weights) - 2)
        self._unit = math.lcm(slack, *(share.denominator for row in shares for share in row))
        """A position, in the units of `_slack` and `_stretches`."""
        self._slack = self._unit // slack
        self._stretches: list[list[tuple[int, int, int, float]]] = []
        """Of each source: (start, what it is due before, its share of a position, end)."""
        for source in range(len(weights)):
            due, stretches = 0, []
            for row, start, end in zip(shares, self._starts, [*self._starts[1:], math.inf], strict=True):
                share = int(row[source] * self._unit)
                stretches.append((start, due, share, end))
                due += share * int(end - start) if end < math.inf else 0
            self._stretches.append(stretches)
        self._counts = [0] * len(weights)
        self._windows = [self._find_window(source) for source in range(len(weights))]
        """Of each source: the first position that its next one may be, and the last."""
        self._sources, self._places = array("H"), array("q")

    def at(self, position: int) -> tuple[int, int]:
        """(source, its positions before this one)."""
        for now in range(len(self._sources), position + 1):
            open_now = [source for source, (first, _) in enumerate(self._windows) if first <= now]
            source = min(open_now, key=lambda each: self._windows[each][1])
            self._sources.append(source)
            self._places.append(self._counts[source])
            self._counts[source] += 1
            self._windows[source] = self._find_window(source)
        return self._sources[position], self._places[position]

    def _find_window(self, source: int) -> tuple[float, float]:
        had = self._counts[source] * self._unit
        return self._reach(source, had + self._slack), self._reach(source, had + self._unit - self._slack)

    def _reach(self, source: int, target: int) -> float:
        """The first position with which the source is due `target`."""
        for start, due, share, end in self._stretches[source]:
            if share and (reached := start - (due - target) // share) <= end:
                return max(reached - 1, 0)
        return math.inf


def shuffle_range(length: int, key: str) -> Sequence[int]:
    """`range(length)` in a random order that depends only on `key`. 8 bytes a number."""
    order = array("q", range(length))
    Random(key).shuffle(order)
    return order
