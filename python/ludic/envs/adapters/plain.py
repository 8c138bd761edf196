"""What other libraries hand over, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any


def to_plain(value: Any) -> Any:
    """`value` in the types of JSON: arrays become lists, numpy's numbers Python's, keys text, and what JSON has no type for its text."""
    if value is None or isinstance(value, str | bool | int | float):
        return value.item() if hasattr(value, "item") else value  # numpy's float64 is a float
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
