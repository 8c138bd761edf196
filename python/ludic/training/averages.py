"""Means that are 0 for an empty input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray


def mean_or_zero(values: Sequence[float]) -> float:
    """Mean of the numbers; 0.0 if there are none."""
    return float(sum(values)) / len(values) if values else 0.0


def array_mean_or_zero(values: NDArray[Any]) -> float:
    """Mean of an array of numbers or flags [N]; 0.0 for N = 0."""
    return float(values.mean()) if len(values) else 0.0
