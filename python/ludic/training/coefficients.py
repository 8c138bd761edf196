"""`Coefficient`: a number of an algorithm that a controller changes between steps."""

from __future__ import annotations

import math

from ludic.errors import ConfigError, DataError, Rules, check_value


class Coefficient:
    """A number in [least, most], such as tau and beta of MaxEnt-GRPO.

    The algorithm's credit and its losses read it with `float(...)` each time that they compute;
    controllers `set` it after the optimizer's steps. Several parts may hold the same object.

    >>> tau = Coefficient(0.1, least=1e-6)
    >>> tau.set(0.0)
    >>> float(tau)
    1e-06
    """

    def __init__(self, value: float, *, least: float = 0.0, most: float | None = None) -> None:
        """With `most` None there is no upper bound. Raises ConfigError for a value that is not
        finite or outside the bounds."""
        if not (math.isfinite(least) and (most is None or least <= most < math.inf)):
            raise ConfigError(f"least ({least}) must be finite and not above most ({most}); None is no upper bound")
        bounds: Rules = {"least": least, "below": math.inf} if most is None else {"least": least, "most": most}
        check_value("value", value, **bounds)
        self.least, self.most = float(least), None if most is None else float(most)
        self._value = float(value)

    @property
    def value(self) -> float:
        """The number at present."""
        return self._value

    def set(self, value: float) -> None:
        """Change the number; one outside the bounds becomes the nearest bound. Raises DataError
        for NaN and infinities."""
        if not math.isfinite(value):
            raise DataError(f"a coefficient must be a finite number, got {value}")
        self._value = max(self.least, float(value) if self.most is None else min(float(value), self.most))

    def __float__(self) -> float:
        return self._value

    def __repr__(self) -> str:
        return f"Coefficient({self._value}, least={self.least}, most={self.most})"


def as_coefficient(value: float | Coefficient, *, least: float = 0.0) -> Coefficient:
    """Return `value` as a coefficient; a `Coefficient` is returned as it is."""
    return value if isinstance(value, Coefficient) else Coefficient(value, least=least)
