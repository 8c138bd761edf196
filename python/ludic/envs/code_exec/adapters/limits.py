"""The limits of time and memory that data sets write in their own ways."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ludic.errors import DataError

_AMOUNT = re.compile(r"\s*([0-9.]+)\s*([a-z]*)\s*")
_SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "milliseconds": 1e-3}
_MEGABYTES = {"": 1.0, "mb": 1.0, "mib": 1.0, "megabyte": 1.0, "megabytes": 1.0, "gb": 1024.0, "gigabytes": 1024.0, "kb": 1 / 1024,
              "kilobytes": 1 / 1024, "bytes": 2.0**-20}  # fmt: skip


def read_limits(row: Mapping[str, Any]) -> dict[str, float]:
    """`timeout_s` and `memory_limit_mb`, as a test's metadata has them, of the columns that say so.

    Example: `{"time_limit": "2.0 seconds", "memory_limit_bytes": 268435456}` gives
    `{"timeout_s": 2.0, "memory_limit_mb": 256.0}`.
    """
    limits = {}
    for name in ("timeout_s", "time_limit_s", "time_limit"):
        if (value := row.get(name)) not in (None, ""):
            limits["timeout_s"] = _amount(name, value, _SECONDS)
            break
    for name, factor in (("memory_limit_mb", 1.0), ("memory_limit_bytes", 2.0**-20), ("memory_limit", 1.0)):
        if (value := row.get(name)) not in (None, "", 0):
            limits["memory_limit_mb"] = factor * _amount(name, value, _MEGABYTES)
            break
    return limits


def _amount(name: str, value: Any, units: Mapping[str, float]) -> float:
    if isinstance(value, Mapping) and isinstance(value.get("seconds"), int):  # as CodeContests has it
        value = value["seconds"] + (value.get("nanos") or 0) * 1e-9
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    match = _AMOUNT.fullmatch(value.lower()) if isinstance(value, str) else None
    try:
        amount = float(match[1]) * units[match[2]] if match else 0.0
    except (KeyError, ValueError):
        amount = 0.0
    if amount <= 0:
        raise DataError(
            f"{name} ({value!r}) must be a number above 0, or one with its unit, such as '2 seconds' or '256 megabytes'"
        )
    return amount
