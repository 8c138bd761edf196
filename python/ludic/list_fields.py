"""Fields of data classes that hold an array until somebody reads them as a list.

A token takes 9 bytes in arrays and 88 as Python numbers in lists, and the core reads an array
without touching its elements. Whoever reads the field of a trace or a sample has a list, which can
be compared, joined, changed and written as JSON. From then on the list is the field's value.
Encoders that read `__dict__` instead, as msgspec's and orjson's do, meet the array: give them
`dataclasses.asdict(record)`.

    trace = TokenTrace.from_arrays(np.array([5, 6]), np.array([7]))
    stored(trace, "prompt_token_ids")  # Column([5, 6], dtype=int32)
    trace.prompt_token_ids             # [5, 6]
    stored(trace, "prompt_token_ids")  # [5, 6]

The arrays are in `ludic.columns`: messages and environments are imported without numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from reprlib import recursive_repr
from typing import Any, TypeVar

T = TypeVar("T")


class ListWhenRead:
    """What `ludic.columns.Column` is. Its `tolist` makes the list."""

    __slots__ = ()


def is_column(value: Any) -> bool:
    """Whether `value` is a `ludic.columns.Column`."""
    return isinstance(value, ListWhenRead)


def stored(record: object, name: str) -> Any:
    """The field as `record` holds it: a `Column` that has not been read as a list, else the
    attribute's value. For code that reads an array as well as a list, and does not change it."""
    try:
        return record.__dict__[name]
    except (AttributeError, KeyError):  # of a class that computes it, or has slots
        return getattr(record, name)


def read_list(record: object, name: str) -> Any:
    """The list that the attribute would be, or None, without a change of what `record` holds."""
    value = stored(record, name)
    return value.tolist() if is_column(value) else value


def lists_when_read(*names: str) -> Callable[[type[T]], type[T]]:
    """A decorator of data classes: a `Column` in one of these fields is a list when it is read."""

    def decorate(cls: type[T]) -> type[T]:
        defaults = {each.name: each.default for each in fields(cls)}  # type: ignore[arg-type]
        for name in names:
            setattr(cls, name, _ListField(name, defaults[name]))
        cls.__repr__ = recursive_repr()(_repr_with_lists)  # type: ignore[method-assign]
        return cls

    return decorate


def _repr_with_lists(record: Any) -> str:
    """The repr of the data class, which shows lists and leaves arrays: tasks and logs call it."""
    values = ((each.name, read_list(record, each.name)) for each in fields(record) if each.repr)
    return f"{type(record).__qualname__}({', '.join(f'{name}={value!r}' for name, value in values)})"


class _ListField:
    """The attribute of a data class whose value may be a `Column`."""

    def __init__(self, name: str, default: Any) -> None:
        self._name, self._default = name, default

    def __get__(self, record: Any, owner: type | None = None) -> Any:
        if record is None:
            if self._default is MISSING:  # as without this class; data classes that inherit ask for it
                raise AttributeError(f"type object {owner.__name__ if owner else '?'!r} has no attribute {self._name!r}")
            return self._default
        held = record.__dict__
        try:
            value = held[self._name]
        except KeyError:
            raise AttributeError(f"{type(record).__name__!r} object has no attribute {self._name!r}") from None
        if is_column(value):
            value = held[self._name] = value.tolist()
        return value

    def __set__(self, record: Any, value: Any) -> None:
        record.__dict__[self._name] = value

    def __delete__(self, record: Any) -> None:
        del record.__dict__[self._name]
