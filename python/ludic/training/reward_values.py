"""What reward functions return: numbers, None, and errors."""

from __future__ import annotations

import inspect
import math
from typing import Any

from ludic.errors import DataError, GradingError, LudicError, RolloutError, error_location
from ludic.interaction.containment import describe_error
from ludic.training.reward_deadline import RewardDeadlineExceeded, RewardsBroken
from ludic.training.reward_signatures import RewardFunction

Reward = float | None | Exception
"""Result of one function for one completion: a number, None if it does not apply, or an error."""


class NoReward(GradingError):
    """An element that is neither a finite number nor None."""


class WrongLength(RewardsBroken, DataError):
    """The number of rewards differs from the number of completions, so that none belongs to one."""


def check_rewards(name: str, returned: Any, expected: int) -> list[Reward]:
    """What the function `name` returned for `expected` completions, as rewards. Raises `DataError`
    if it is no list, and `WrongLength` for another number of elements."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        raise DataError(f"it returned {type(returned).__name__}; it must return a list with one reward for each completion")
    if len(returned) != expected:
        raise WrongLength(
            f"reward function {name} returned {len(returned)} rewards for {expected} completions; return one for each, None where it "
            "does not apply"
        )
    return [_reward(element) for element in returned]


def _reward(element: Any) -> Reward:
    if element is None or isinstance(element, Exception):
        return element
    if isinstance(element, str):
        return NoReward(f"the text {element!r}, where a reward must be a number or None,")
    try:
        number = float(element)
    except (TypeError, ValueError, OverflowError):  # an integer beyond every float
        return NoReward(f"{element!r}, where a reward must be a number or None,")
    return number if math.isfinite(number) else NoReward(f"{number}, where a reward must be finite, or None,")


def reward_failure(name: str, function: RewardFunction, error: Exception) -> Exception:
    """Return the error of a function for a rollout."""
    failure = GradingError(f"reward function {name} failed: {_reason(function, error)}")
    failure.__cause__ = error
    return failure


def _reason(function: RewardFunction, error: Exception) -> str:
    if isinstance(error, LudicError | RewardDeadlineExceeded):
        return str(error)
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    place = error_location(error, None if code is None else code.co_filename)
    return f"{describe_error(error)} ({place})" if place else describe_error(error)


def exit_error(error: SystemExit) -> Exception:
    """The error of a function that ended the process, which goes on."""
    failure = RolloutError(f"it called sys.exit({error.code!r})")
    failure.__cause__ = error
    return failure
