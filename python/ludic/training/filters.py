"""Sample filters: predicates that return True for the samples to keep. Filters of whole groups and
of samples with weight 0 are in `algorithm`.

A named filter that is called without an argument returns itself, so `combine(drop_truncated, ...)`
and `combine(drop_truncated(), ...)` are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from ludic.training.types import SampleFilter, SAWItem


class _Predicate:
    """A named filter that can be called with a sample or without an argument."""

    def __init__(self, keep: Callable[[SAWItem], bool]) -> None:
        self._keep = keep
        self.__name__ = keep.__name__
        self.__doc__ = keep.__doc__

    @overload
    def __call__(self) -> SampleFilter: ...
    @overload
    def __call__(self, item: SAWItem) -> bool: ...
    def __call__(self, item: SAWItem | None = None) -> bool | SampleFilter:
        return self if item is None else self._keep(item)

    def __repr__(self) -> str:
        return f"<filter {self.__name__}>"


@_Predicate
def keep_all(item: SAWItem) -> bool:
    """Keep every sample."""
    return True


@_Predicate
def drop_truncated(item: SAWItem) -> bool:
    """Drop samples of episodes that were cut short (`meta["truncated"]`)."""
    return not item.meta.get("truncated", False)


@_Predicate
def drop_incomplete_completions(item: SAWItem) -> bool:
    """Drop completions that reached the token limit (`finish_reason == "length"`)."""
    return bool(item.meta.get("finish_reason") != "length")


@_Predicate
def drop_parse_errors(item: SAWItem) -> bool:
    """Drop actions that the parser rejected (`meta["parse_error"]`)."""
    return not item.meta.get("parse_error", False)


def combine(*filters: SampleFilter) -> SampleFilter:
    """Return a filter that keeps the samples which every one of `filters` keeps."""

    def keep(item: SAWItem) -> bool:
        return all(f(item) for f in filters)

    return keep


def any_of(*filters: SampleFilter) -> SampleFilter:
    """Return a filter that keeps the samples which at least one of `filters` keeps."""

    def keep(item: SAWItem) -> bool:
        return any(f(item) for f in filters)

    return keep


def apply_filter(items: Sequence[SAWItem], sample_filter: SampleFilter) -> list[SAWItem]:
    """Return the samples that the filter keeps, in order."""
    return [item for item in items if sample_filter(item)]
