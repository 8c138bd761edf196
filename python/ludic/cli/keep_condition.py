"""Conditions that select episodes: `reward > 0 and length <= 4`.

    condition  = comparison { "and" comparison }
    comparison = key ( ">" | ">=" | "<" | "<=" | "==" | "!=" ) number

A key is `reward`, `length` or `completion_tokens`, or a number or boolean of the last step's info
or of the rollout's meta; `a.b` reads a key of an object. The condition is parsed, never evaluated
as code.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ludic.errors import ConfigError, DataError
from ludic.list_fields import stored
from ludic.types import Rollout

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_COMPARISON = re.compile(
    r"\s*(?P<key>[A-Za-z_][\w-]*(?:\.[\w-]+)*)\s*(?P<operator>>=|<=|==|!=|>|<)\s*(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"(?![\w.])\s*"
)
_AND = re.compile(r"and\b", re.IGNORECASE)
_OWN: dict[str, Callable[[Rollout], float]] = {
    "reward": lambda rollout: rollout.total_reward,
    "total_reward": lambda rollout: rollout.total_reward,
    "length": lambda rollout: float(rollout.length),
    "completion_tokens": lambda rollout: float(
        sum(len(stored(step.trace, "completion_token_ids")) for step in rollout.steps if step.trace is not None)
    ),
}


@dataclass(frozen=True)
class Comparison:
    """Compares the number under one key with a constant."""

    key: str
    symbol: str
    number: float

    def holds(self, rollout: Rollout) -> bool:
        return _OPERATORS[self.symbol](read_number(rollout, self.key), self.number)


@dataclass(frozen=True)
class Keep:
    """A condition on rollouts.

    >>> keep = Keep.parse("reward > 0 and length <= 4")
    >>> good = [rollout for rollout in rollouts if keep(rollout)]
    """

    comparisons: tuple[Comparison, ...]

    @classmethod
    def parse(cls, text: str) -> Keep:
        """Raises ConfigError, with the position, for anything outside the grammar above."""
        comparisons, at = [], 0
        while True:
            match = _COMPARISON.match(text, at)
            if match is None:
                raise _syntax_error(text, at, "a comparison such as reward>0")
            number = float(match["number"])
            if not math.isfinite(number):
                raise _syntax_error(text, match.start("number"), "a finite number")
            comparisons.append(Comparison(match["key"], match["operator"], number))
            if match.end() == len(text):
                return cls(tuple(comparisons))
            conjunction = _AND.match(text, match.end())
            if conjunction is None:
                raise _syntax_error(text, match.end(), '"and" or the end')
            at = conjunction.end()

    def __call__(self, rollout: Rollout) -> bool:
        return all(comparison.holds(rollout) for comparison in self.comparisons)


def read_number(rollout: Rollout, key: str) -> float:
    """The number under `key`; True is 1. Raises DataError, with the available keys, if the rollout
    has no number under `key`."""
    if key in _OWN:
        return _OWN[key](rollout)
    info = rollout.steps[-1].info if rollout.steps else {}
    for source in (info, rollout.meta):
        value = _look_up(source, key)
        if isinstance(value, bool | int | float):
            return float(value)
    available = [
        *_OWN,
        *(name for source in (info, rollout.meta) for name, value in source.items() if isinstance(value, bool | int | float)),
    ]
    raise DataError(f"--keep: rollout {rollout.id} has no number {key!r}; it has {', '.join(dict.fromkeys(available))}")


def _look_up(source: Mapping[str, Any], key: str) -> Any:
    value: Any = source
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _syntax_error(text: str, at: int, expected: str) -> ConfigError:
    return ConfigError(
        f"--keep {text!r}: expected {expected} at character {at + 1} ({text[at : at + 20]!r}); a condition is KEY > NUMBER, with >, >=, <, "
        '<=, == or !=, joined by "and"'
    )
