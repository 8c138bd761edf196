"""An error of one rank as JSON, and the error that the other ranks raise for it."""

from __future__ import annotations

import importlib
import socket
from typing import Any

from ludic.errors import TRY_AGAIN, RankError

_KNOWN = ("ludic.errors", "builtins", "torch", "safetensors", "jinja2")
"""Modules with errors for which the exit status of a rank, or what its user is told, depends on the
class."""


def describe_error(error: BaseException, *, exit_code: int = TRY_AGAIN, rank: int = 0) -> dict[str, Any]:
    """An error as JSON: its text, its host, the names of its class and of that class's bases, the
    nearest first, and the other values that decide the exit status of a rank. `exit_code`: the exit
    status of this rank, whose number is `rank`."""
    kinds = [base.__name__ for base in type(error).__mro__ if issubclass(base, Exception)]
    facts: dict[str, Any] = {}
    if isinstance(error, OSError):
        facts["errno"] = error.errno
    if isinstance(error, RankError):
        facts["exit_code"] = error.exit_code
    place = f"rank {rank}, on {socket.gethostname()}"
    return {"kinds": kinds, "text": str(error), "place": place, "facts": facts, "exit_code": exit_code}


def rebuild_error(description: dict[str, Any]) -> Exception:
    """The error of `describe_error`: of the first of its classes that a module of `_KNOWN` has and
    that takes just a message, else a RankError with its exit status. A note says where it was
    raised, and as what.

    Example: a user's `class NoMoreGames(RequestsExhausted)` becomes RequestsExhausted with the note
    `raised by rank 0, on host1, as NoMoreGames`.
    """
    text, place, kinds = description["text"], description["place"], description["kinds"]
    for kind in kinds:
        if kind in ("LudicError", "Exception"):
            continue  # they say nothing
        for module in _KNOWN:
            known = vars(importlib.import_module(module)).get(kind)
            if not (isinstance(known, type) and issubclass(known, Exception)):
                continue
            try:
                error = known(text)
            except TypeError:  # it needs more than a message
                continue
            for name, value in description["facts"].items():
                setattr(error, name, value)
            error.add_note(f"raised by {place}" + ("" if kind == kinds[0] else f", as {kinds[0]}"))
            return error
    if not kinds:
        return RankError(f"{place}, was interrupted ({text or 'without a message'})")
    return RankError(f"{kinds[0]} on {place}: {text or 'without a message'}", exit_code=description["exit_code"])
