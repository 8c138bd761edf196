"""Arrays of token ids, masks and log-probabilities for fields that are lists when they are read
(`ludic.list_fields`)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ludic import _core
from ludic.list_fields import ListWhenRead


class Column(np.ndarray, ListWhenRead):
    """[N] numbers of a field that `lists_when_read` knows. Make it with `int_column` or
    `float_column`."""


def int_column(values: Any) -> Column:
    """[N] token ids as int32; a `Column` as it is. Raises DataTypeError for what is no sequence of
    whole numbers, DataError for an id that 32 bits cannot hold."""
    return values if type(values) is Column else _core.read_ids(values).view(Column)


def float_column(values: Any) -> Column:
    """[N] log-probabilities as float32 if that changes none of them, else as float64: read as a
    list, they are the numbers that were given. Raises DataTypeError for what is no sequence of
    numbers."""
    return values if type(values) is Column else _core.read_floats(values).view(Column)


def mask_column(num_zeros: int, num_ones: int) -> Column:
    """[`num_zeros` + `num_ones`] uint8: first the zeros, then the ones. Read-only: all masks are
    windows of one array."""
    half = 1 << max(14, num_zeros.bit_length(), num_ones.bit_length())
    return _zeros_and_ones(half)[half - num_zeros : half + num_ones].view(Column)


@cache
def _zeros_and_ones(half: int) -> Column:
    """[2 * `half`] as many zeros as ones."""
    mask = np.repeat(np.array([0, 1], np.uint8), half)
    mask.flags.writeable = False
    return mask.view(Column)
