"""A fraction that displays show as a percentage."""

from __future__ import annotations


class Percent(float):
    """A fraction, such as 0.25, that terminals show as 25.0%. For everything else it is a float.

    >>> Percent(0.25) + 1, Percent(0.25).as_percentage(1)
    (1.25, '25.0%')
    """

    __slots__ = ()

    def as_percentage(self, places: int) -> str:
        """The percentage with `places` decimals."""
        return f"{100.0 * self:.{places}f}%"
