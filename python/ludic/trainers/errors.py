"""Errors in what the user wrote, without the library's own frames."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from ludic.errors import INPUT_ERRORS, CheckpointError

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)


def with_short_errors(call: Callable[P, T]) -> Callable[P, T]:
    """`call`, whose traceback for wrong input ends at the user's line: the message says what is
    wrong. The logger `ludic.trainers.errors` has the whole one, at the level DEBUG. Any other error
    keeps its own."""

    @wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except (*INPUT_ERRORS, CheckpointError) as error:
            logger.debug("where it was raised", exc_info=True)
            raise error.with_traceback(None) from None

    return wrapped
