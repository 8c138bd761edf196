"""The columns of a sample as base64 of arrays, for states with many tokens.

A column is written as `{"dtype": "int32", "base64": "..."}`. A token of a sample takes 16/3 bytes
for its id, 4/3 for its mask and 16/3 for its log-probability: 12 in all.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np

from ludic.errors import DataError

_DTYPES = ("int32", "int64", "uint8", "float32", "float64")
"""The types a column may have; always little-endian."""
COLUMNS = ("tokens", "loss_mask", "rollout_log_probs")


def pack_columns(data: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with its columns packed, those that are None left as they are. Ids and masks are read
    back exactly; log-probabilities are rounded to float32."""
    packed = dict(data)
    for name in COLUMNS:
        if data.get(name) is not None:
            column = np.asarray(data[name])
            dtype = _smallest_dtype(name, column)
            content = column.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
            packed[name] = {"dtype": dtype, "base64": base64.b64encode(content).decode("ascii")}
    return packed


def _smallest_dtype(name: str, column: np.ndarray[Any, Any]) -> str:
    """Example: a mask of 0 and 1 fits uint8, one that holds 0.5 needs float64."""
    if name == "rollout_log_probs":
        return "float32"
    if name == "loss_mask":
        return "uint8" if bool(np.isin(column, (0, 1)).all()) else "float64"
    fits = column.size == 0 or (column.min() >= -(2**31) and column.max() < 2**31)
    return "int32" if fits else "int64"


def unpack_columns(data: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with its packed columns as lists; others stay as they are."""
    unpacked = dict(data)
    for name in COLUMNS:
        column = data.get(name)
        if not isinstance(column, Mapping):
            continue
        dtype = column.get("dtype")
        if dtype not in _DTYPES:
            raise DataError(f"the packed column {name} has the dtype {dtype!r}; it must be one of {', '.join(_DTYPES)}")
        try:
            content = base64.b64decode(column.get("base64", ""), validate=True)
            values = np.frombuffer(content, np.dtype(dtype).newbyteorder("<"))
        except (binascii.Error, ValueError, TypeError) as error:
            raise DataError(f"the packed column {name} cannot be read: {error}; the state was changed or cut short") from error
        unpacked[name] = list(map(float, values)) if name == "loss_mask" else values.tolist()
    return unpacked
