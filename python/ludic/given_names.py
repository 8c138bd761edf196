"""Objects that a run was given as such, and not by a name that another process can import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class GivenNames(Generic[T]):
    """The names of such objects, in the run that is given them.

    >>> with TOOLS.given({"look_up": look_up}):
    ...     TOOLS.now["look_up"]
    """

    def __init__(self, kind: str) -> None:
        self._now: ContextVar[Mapping[str, T] | None] = ContextVar(kind, default=None)

    @property
    def now(self) -> Mapping[str, T]:
        """The objects by name; none outside the block."""
        return self._now.get() or {}

    @contextmanager
    def given(self, objects: Mapping[str, T]) -> Iterator[None]:
        """Inside the block, and in the threads and tasks that it starts, these have their names;
        elsewhere nobody sees them."""
        token = self._now.set(dict(objects))
        try:
            yield
        finally:
            self._now.reset(token)
