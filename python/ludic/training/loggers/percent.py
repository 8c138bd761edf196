"""A share that displays show as a percentage."""

from __future__ import annotations


class Percent(float):
    """A fraction, 0.25, that loggers for the eye show as 25.0%. For everything else it is a float.

    >>> Percent(0.25) + 1, Percent(0.25).shown(1)
    (1.25, '25.0%')
    """

    __slots__ = ()

    def shown(self, places: int) -> str:
        """In percent, with so many decimal places."""
        return f"{100.0 * self:.{places}f}%"
