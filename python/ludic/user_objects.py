"""Objects of the user: named in a recipe as `package.module:name`, given to a run without a name
that another process can import, or adapted because they may lack members.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

from ludic.errors import ConfigError, did_you_mean, error_location


def import_named(path: str, setting: str) -> Any:
    """The object that `path` names, in an installed package or a file of the current directory.

    Raises ConfigError, which names `setting`, if it is not found or its import fails.
    """
    module, mark, name = path.partition(":")
    if not mark or not module or not name:
        raise ConfigError(f"{setting} ({path}) must be package.module:name, such as rewards:exact for `exact` of ./rewards.py")
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise ConfigError(f"{setting} ({path}): name the module and not its file, such as {dotted}:{name}")
    with _current_directory_first():
        try:
            loaded = import_module(module)
        except Exception as error:  # the user's module may raise anything
            raise ConfigError(f"{setting} ({path}) cannot be imported: {_fault(error, module)}") from error
    if not hasattr(loaded, name):
        raise ConfigError(f"{setting} ({path}): {loaded.__file__} has no {name!r}{did_you_mean(name, vars(loaded))}")
    return getattr(loaded, name)


def _fault(error: Exception, module: str) -> str:
    """The reason in words: an unknown module, or the exception of the module and its place."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module}.".startswith(f"{error.name}."):
        here = sorted(file.stem for file in Path.cwd().glob("*.py"))
        return f"{error}; write package.module:name{did_you_mean(module, here)}"
    place = "" if isinstance(error, SyntaxError) else error_location(error)  # the message of a syntax error has the place
    return f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")


@contextmanager
def _current_directory_first() -> Iterator[None]:
    """Put the current directory first on `sys.path`, and last afterwards: modules can still import
    their neighbours later, but no file there hides an installed package."""
    here = os.getcwd()
    was_listed = here in sys.path
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
        if not was_listed:
            sys.path.append(here)


T = TypeVar("T")


class GivenNames(Generic[T]):
    """The names of objects that no other process can import, in the run that is given them.

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
        """Inside the block, and in the threads and tasks that it starts, these have their names,
        in addition to the objects of blocks around it; they are not visible elsewhere."""
        token = self._now.set({**self.now, **objects})
        try:
            yield
        finally:
            self._now.reset(token)


def forward_members(adapted: str, names: Iterable[str]) -> Callable[[type[T]], type[T]]:
    """A class decorator. Each member in `names` is read from the object in the attribute `adapted`
    on each access; where that object lacks it, the adapter's base class has it.

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
            setattr(adapter, name, property(partial(_read, adapter, adapted, name)))
        return adapter

    return decorate


def _read(adapter: type, adapted: str, name: str, instance: Any) -> Any:
    inner = getattr(instance, adapted)
    try:
        return getattr(inner, name)
    except AttributeError:
        if hasattr(type(inner), name):
            raise  # by a property of the user's, which exists and failed
    return getattr(super(adapter, instance), name)
