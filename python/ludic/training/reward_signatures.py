"""The signatures of reward functions: what they are called, and which keywords they take."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ludic.errors import ConfigError

RewardFunction = Callable[..., Any]
PROVIDED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "is_eval")
"""Keywords besides the columns of the data."""


def needed_columns(function: RewardFunction) -> list[str]:
    """The columns of the data without which the function cannot be called."""
    return [needed for needed in required_arguments(function) if needed not in PROVIDED]


def describe_missing(name: str, missing: Sequence[str], columns: Sequence[str]) -> str:
    """The error for columns that the function of this name needs and the data does not have.
    `columns`: those that it has, without the prompt."""
    known = f"its columns besides the prompt: {', '.join(columns)}" if columns else "it has none but the prompt"
    return f"reward function {name} asks for {' and '.join(missing)}, which the data does not have; {known}"


def name_functions(functions: Sequence[RewardFunction]) -> list[str]:
    """Return distinct names of the functions: `exact`, and `exact_2` for a second function with
    that name."""
    seen: Counter[str] = Counter()
    names: list[str] = []
    for function in functions:
        if not callable(function):
            raise ConfigError(f"a reward function must be callable, got {type(function).__name__}")
        inner = getattr(function, "func", function)  # functools.partial
        name = str(getattr(inner, "__name__", type(inner).__name__))
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return names


def _parameters(function: RewardFunction) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def accepts(function: RewardFunction, name: str) -> bool:
    """Whether the function can be called with the keyword `name`."""
    parameters = _parameters(function)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return True
    return name in parameters


def required_arguments(function: RewardFunction) -> list[str]:
    """The arguments without a default."""
    fixed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [name for name, p in _parameters(function).items() if p.default is p.empty and p.kind not in fixed]
