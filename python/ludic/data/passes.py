"""Passes over data: which sample is at which position, pass after pass, without end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

PassOrder = Callable[[int], Sequence[int]]
"""The number of a pass, from 0 -> its order of samples."""


class Passes:
    """Passes over `length` samples. The order of a pass depends only on its number, so a position
    is all that a checkpoint has to save.

    >>> passes = Passes(3, lambda number: [0, 1, 2] if number == 0 else [2, 0, 1])
    >>> [passes.at(position) for position in range(5)]
    [0, 1, 2, 2, 0]
    """

    def __init__(self, length: int, order: PassOrder | None = None) -> None:
        """`order` returns the order of a pass; None: every pass is in the order of the data.

        Saved positions are only valid for one order. Each caller therefore keeps the random stream
        that its checkpoints were written with.
        """
        self._length, self._order = length, order
        self._number = -1
        self._current: Sequence[int] = ()

    def at(self, position: int) -> int:
        """The sample at a position. Example: with 3 samples, position 7 is the second of pass 2,
        since 7 = 2 * 3 + 1; if the order of pass 2 is [2, 0, 1], it is sample 0."""
        number, offset = divmod(position, self._length)
        if self._order is None:
            return offset
        if number != self._number:
            self._number, self._current = number, self._order(number)
        return int(self._current[offset])


def shuffle_range(length: int, key: str) -> list[int]:
    """`range(length)` in a random order that depends only on `key`."""
    order = list(range(length))
    Random(key).shuffle(order)
    return order
