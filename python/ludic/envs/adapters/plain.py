"""What other libraries hand over, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Set as AbstractSet
from typing import Any


def to_plain(value: Any) -> Any:
    """`value` in the types of JSON: arrays become lists, numpy's numbers Python's, keys text,
    and what JSON has no type for its text."""
    if isinstance(value, float | str) and hasattr(value, "item"):  # numpy's float64 and str_ are Python's types too
        return value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_plain(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(element) for element in value]
    if isinstance(value, AbstractSet):
        return sorted((to_plain(element) for element in value), key=str)
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    if hasattr(value, "model_dump"):
        return to_plain(value.model_dump())
    return str(value)
