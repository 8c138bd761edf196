"""A fraction that terminals display as a percentage."""

from __future__ import annotations


class Percent(float):
    """A fraction, such as 0.25, that terminals display as 25.0%. Otherwise it is a plain float.

    >>> Percent(0.25) + 1, Percent(0.25).as_percentage(1)
    (1.25, '25.0%')
    """

    __slots__ = ()

    def as_percentage(self, places: int) -> str:
        """Return the percentage with `places` decimals, as text."""
        return f"{100.0 * self:.{places}f}%"
