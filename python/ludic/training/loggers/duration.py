"""Seconds that terminals display as hours, minutes and seconds."""

from __future__ import annotations


class Duration(float):
    """Seconds, such as 200.0, that terminals display as 3m20s. Otherwise it is a plain float.

    >>> Duration(200.0).as_text(), Duration(7500.0).as_text(), Duration(0.4).as_text()
    ('3m20s', '2h05m', '0s')
    """

    __slots__ = ()

    def as_text(self) -> str:
        """Return the time, rounded to seconds, or to minutes from an hour on."""
        whole = round(self)
        if whole < 60:
            return f"{whole}s"
        minutes, seconds = divmod(whole, 60)
        return f"{minutes}m{seconds:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
