"""Errors in what the user wrote: without the library's own frames, and with our names for TRL's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from inspect import signature
from os import PathLike
from typing import ParamSpec, TypeVar

from ludic.errors import INPUT_ERRORS, CheckpointError, ConfigTypeError
from ludic.recipes.foreign_names import ARGUMENTS

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)
_SETTINGS_TOO = ("tokenizer", "reward_model")
"""Arguments of TRL that are settings here, whose values are paths and no objects."""


def with_short_errors(call: Callable[P, T]) -> Callable[P, T]:
    """`call`, whose traceback for wrong input ends at the user's line: the message names the fault.
    The logger `ludic.trainers.errors` has the whole one, at the level DEBUG. Any other error keeps
    its own."""

    @wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except (*INPUT_ERRORS, CheckpointError) as error:
            logger.debug("where it was raised", exc_info=True)
            raise error.with_traceback(None) from None

    return wrapped


def without_trl_names(call: Callable[P, T]) -> Callable[P, T]:
    """`call`, which refuses arguments that are TRL's and not its own with a ConfigTypeError that
    names ours for each."""
    own = signature(call).parameters

    @wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        wrong = [name for name in kwargs if name in ARGUMENTS and name not in own]
        settings = {name for name in _SETTINGS_TOO if isinstance(kwargs.get(name), str | PathLike | None)}
        if wrong := [name for name in wrong if name not in settings]:
            raise ConfigTypeError("; ".join(f"{name} is an argument of TRL; write {ARGUMENTS[name]}" for name in wrong))
        return call(*args, **kwargs)

    return wrapped
