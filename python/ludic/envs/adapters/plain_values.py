"""Values of other libraries in the types of JSON."""

from __future__ import annotations

from collections.abc import Mapping, Set as AbstractSet
from typing import Any


def to_json_types(value: Any) -> Any:
    """`value` in the types of JSON: arrays become lists, NumPy scalars Python numbers, keys
    strings, and anything that JSON has no type for `str(value)`."""
    if isinstance(value, float | str) and hasattr(value, "item"):  # NumPy's float64 and str_ subclass Python's types
        return value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json_types(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_types(element) for element in value]
    if isinstance(value, AbstractSet):
        return sorted((to_json_types(element) for element in value), key=str)
    if hasattr(value, "tolist"):
        return to_json_types(value.tolist())
    if hasattr(value, "model_dump"):
        return to_json_types(value.model_dump())
    return str(value)
