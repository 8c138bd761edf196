"""Adapters around objects of the user, which have the required members and may lack the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def forward_members(adapted: str, names: Iterable[str]) -> Callable[[type[T]], type[T]]:
    """A class decorator. Each member in `names` is read from the object in the attribute `adapted`,
    every time it is asked for; where that object lacks it, the adapter's base class has it.

    >>> class Source:
    ...     overlaps = False
    >>> @forward_members("inner", ["overlaps"])
    ... class AdaptedSource(Source):
    ...     def __init__(self, inner):
    ...         self.inner = inner
    >>> AdaptedSource(object()).overlaps
    False
    """

    def decorate(adapter: type[T]) -> type[T]:
        for name in names:
            setattr(adapter, name, property(_reader(adapter, adapted, name)))
        return adapter

    return decorate


def _reader(adapter: type, adapted: str, name: str) -> Callable[[Any], Any]:
    def read(self: Any) -> Any:
        inner = getattr(self, adapted)
        try:
            return getattr(inner, name)
        except AttributeError:
            if hasattr(type(inner), name):
                raise  # by a property of the user's, which exists and failed
        return getattr(super(adapter, self), name)

    return read
