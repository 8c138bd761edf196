"""An error of rank 0 as JSON, and the error that the other ranks raise for it."""

from __future__ import annotations

import builtins
import socket
from collections.abc import Iterator
from typing import Any

from ludic import errors
from ludic.errors import RankError


def describe_error(error: BaseException) -> dict[str, Any]:
    """An error as JSON: its text, its host, the names of its class and of that class's bases, the
    nearest first, and what else decides the exit status of a rank."""
    kinds = [base.__name__ for base in type(error).__mro__ if issubclass(base, Exception)]
    facts: dict[str, Any] = {}
    if isinstance(error, OSError):
        facts["errno"] = error.errno
    if isinstance(error, RankError):
        facts["exit_code"] = error.exit_code
    return {"kinds": kinds, "text": str(error), "host": socket.gethostname(), "facts": facts}


def rebuild_error(description: dict[str, Any]) -> Exception:
    """The error of `describe_error`: of the first of its classes that ludic or Python has and that
    takes just a message, else a RankError. A note says where it was raised.

    Example: a user's `class NoMoreGames(RequestsExhausted)` becomes RequestsExhausted.
    """
    text, place = description["text"], f"rank 0, on {description['host']}"
    for kind in description["kinds"]:
        for known in _classes_named(kind):
            try:
                error = known(text)
            except TypeError:  # it needs more than a message
                continue
            for name, value in description["facts"].items():
                setattr(error, name, value)
            error.add_note(f"raised by {place}")
            return error
    return RankError(f"{place}, was interrupted ({text or 'without a message'})")


def _classes_named(kind: str) -> Iterator[type[Exception]]:
    if kind in ("LudicError", "Exception"):
        return  # they say nothing
    for found in (vars(errors).get(kind), vars(builtins).get(kind)):
        if isinstance(found, type) and issubclass(found, Exception):
            yield found
