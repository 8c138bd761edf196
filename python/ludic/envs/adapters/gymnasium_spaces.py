"""Gymnasium spaces as text: formats observations, parses actions, describes legal actions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from ludic.envs.adapters.plain_values import to_json_types
from ludic.errors import ConfigError

ReadAction = Callable[[str], Any]
"""Text to an element of the action space; ValueError, which says what is legal, for other text."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_HIGHLIGHT = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)


def rendered_text(frame: str) -> str:
    """A terminal rendering without its colours: highlighted text is put in brackets."""
    return _HIGHLIGHT.sub(r"[\1]", frame).strip("\n")


def observation_text(space: Any, value: Any) -> str:
    """An observation as text: numbers to four digits, arrays of several dimensions with one row a
    line, dictionaries with one key a line."""
    kind = type(space).__name__
    if kind == "Text":
        return str(value)
    if kind == "Discrete":
        return str(int(value))
    if kind == "Tuple":
        return ", ".join(observation_text(part, element) for part, element in zip(space.spaces, value, strict=True))
    if kind == "Dict":
        return "\n".join(f"{key}: {observation_text(part, value[key])}" for key, part in space.spaces.items())
    if kind in ("Box", "MultiDiscrete", "MultiBinary"):
        return _rows(to_json_types(value))
    return json.dumps(to_json_types(value))


def _rows(numbers: Any) -> str:
    if not isinstance(numbers, list):
        return _number(numbers)
    if numbers and isinstance(numbers[0], list):
        return "\n".join(_rows(row) for row in numbers)
    return " ".join(map(_number, numbers))


def _number(value: float | int) -> str:
    return str(int(value)) if isinstance(value, int) else f"{value:.4g}"


def action_reader(space: Any, names: Sequence[str] | None) -> tuple[ReadAction, str]:
    """(the parser of actions of this space, the legal actions in words). `names` are those of a
    Discrete space, in order.

    Raises ConfigError for a space whose actions have no obvious text form, and for names that do
    not fit.
    """
    kind = type(space).__name__
    if names is not None:
        return _named(space, kind, names)
    if kind == "Discrete":
        low, high = int(space.start), int(space.start) + int(space.n) - 1
        legal = f"a whole number from {low} to {high}"
        return (lambda text: _integers(text, [low], [high], legal)[0]), legal
    if kind in ("MultiDiscrete", "MultiBinary"):
        return _several(space, kind)
    if kind == "Text":
        legal = f"a text of {space.min_length} to {space.max_length} characters out of {space.characters!r}"
        return (lambda text: _contained(space, text, legal)), legal
    raise ConfigError(
        f"actions of a {kind} space cannot be read from text; give `read_action`, a function from text to an action, or take an "
        "environment whose action space is Discrete, MultiDiscrete, MultiBinary or Text"
    )


def _named(space: Any, kind: str, names: Sequence[str]) -> tuple[ReadAction, str]:
    if kind != "Discrete" or len(names) != space.n:
        size = f" of {space.n} actions" if kind == "Discrete" else ""
        raise ConfigError(
            f"action_names has {len(names)} names for a {kind} space{size}; it names each action of a Discrete space, in order"
        )
    of_name = {name.casefold(): index + int(space.start) for index, name in enumerate(names)}
    if len(of_name) != len(names):
        raise ConfigError(f"action_names ({list(names)}) must differ from each other, whatever the case")
    legal = f"one of {', '.join(names)}"

    def read(text: str) -> int:
        if text.strip().casefold() not in of_name:
            raise ValueError(legal)
        return of_name[text.strip().casefold()]

    return read, legal


def _several(space: Any, kind: str) -> tuple[ReadAction, str]:
    import numpy as np

    shape = space.shape
    if kind == "MultiBinary":
        low, high = [0] * int(np.prod(shape)), [1] * int(np.prod(shape))
    else:
        low = [int(start) for start in np.ravel(space.start)]
        high = [start + int(count) - 1 for start, count in zip(low, np.ravel(space.nvec), strict=True)]
    bounds = ", ".join(f"{least} to {most}" for least, most in zip(low, high, strict=True))
    legal = f"{len(low)} whole numbers with spaces between them, in these bounds: {bounds}"
    return (lambda text: np.array(_integers(text, low, high, legal), dtype=space.dtype).reshape(shape)), legal


def _integers(text: str, low: list[int], high: list[int], legal: str) -> list[int]:
    words = text.replace(",", " ").split()
    if len(words) != len(low) or not all(map(_INTEGER.fullmatch, words)):
        raise ValueError(legal)
    numbers = [int(word) for word in words]
    if not all(least <= number <= most for least, number, most in zip(low, numbers, high, strict=True)):
        raise ValueError(legal)
    return numbers


def _contained(space: Any, text: str, legal: str) -> str:
    if not space.contains(text):
        raise ValueError(legal)
    return text
