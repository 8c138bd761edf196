"""Columns of numbers as the bytes of an entry: ids, log-probabilities and masks of T tokens. No
object is made for a token."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludic.training.queue.envelope import EntryError


def ids_to_bytes(ids: Any) -> bytes:
    """Token ids as 32-bit integers, little-endian. Raises OverflowError for larger ones."""
    return np.asarray(ids, dtype="<i4").tobytes() if len(ids) else b""


def ids_from_bytes(column: bytes) -> NDArray[np.int32]:
    """The ids of `ids_to_bytes`, in their memory."""
    if len(column) % 4:
        raise EntryError(f"a column of token ids has {len(column)} bytes, which is no multiple of 4")
    return np.frombuffer(column, dtype="<i4")


def floats_to_bytes(values: Any) -> bytes:
    """Numbers as 32-bit floats if that loses nothing, as with what comes from a model in this
    process, else as 64-bit ones."""
    wide = np.asarray(values, dtype="<f8")
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype("<f4")
    return (narrow if np.array_equal(narrow, wide) else wide).tobytes()


def floats_from_bytes(column: bytes, length: int) -> NDArray[np.float64]:
    """The `length` numbers of `floats_to_bytes`, as 64-bit floats. Raises EntryError unless there
    are so many."""
    if len(column) not in (4 * length, 8 * length):
        raise EntryError(
            f"a column of {len(column)} bytes cannot hold the log-probabilities of {length} tokens, or their fractions"
        )
    return np.frombuffer(column, dtype="<f4" if len(column) == 4 * length else "<f8").astype(np.float64)


def bits_to_bytes(mask: Any, name: str) -> bytes:
    """[T] zeros and ones as bits, the first in the highest. Example: [1, 0, 1] is 0b10100000.
    Raises ValueError, which says which mask it is by its `name`, for other numbers."""
    bits = np.asarray(mask)
    if not np.isin(bits, (0, 1)).all():
        raise ValueError(f"{name} must have zeros and ones only")
    return np.packbits(bits.astype(np.uint8)).tobytes()


def bits_from_bytes(column: bytes, length: int) -> NDArray[np.uint8]:
    """The `length` bits of `bits_to_bytes`. Raises EntryError for another number of bytes."""
    if len(column) != (length + 7) // 8:
        raise EntryError(f"a mask of {len(column)} bytes cannot be that of {length} tokens")
    return np.unpackbits(np.frombuffer(column, dtype=np.uint8), count=length)
