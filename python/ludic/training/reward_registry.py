"""Reward functions by name, for the `reward` of a recipe: the built-in verifiers, and your own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ludic.envs.maths import TaggedMathReward, gsm8k_reward, math_reward
from ludic.errors import ConfigError
from ludic.user_objects import GivenNames

MakeReward = Callable[[], Callable[..., Any]]
VERIFIERS: dict[str, MakeReward] = {"gsm8k": gsm8k_reward, "math": math_reward, "pure_accuracy_math": TaggedMathReward}
"""The built-in ones: 1 for a right answer, 0 for any other."""
CODE_REWARDS = {"code": False, "code_partial": True}
"""Names for `reward` that are a task of their own, which runs programs -> whether some of the tests
earn a part of the reward."""
_OWN: dict[str, MakeReward] = {}
_GIVEN = GivenNames[Callable[..., Any]]("rewards")
given_rewards = _GIVEN.given


def register_reward(name: str, make: MakeReward | None = None, *, replace: bool = False) -> Any:
    """Let recipes name a reward. `make` takes no arguments and returns the reward function. Without
    `make` it is a decorator of that function. Raises ConfigError for a name that is taken; with
    `replace`, only for the name of a built-in one.

    >>> @register_reward("short")
    ... def make_short():
    ...     return lambda completions: [-float(len(text)) for text in completions]
    """
    if not name or ":" in name or not name.isprintable():
        raise ConfigError(f"the name of a reward ({name!r}) must be text without `:`, which separates a module from a function")
    if name in VERIFIERS or (name in _OWN and not replace):
        raise ConfigError(f"there is a reward {name!r} already; register yours under another name")

    def register(made: MakeReward) -> MakeReward:
        if not callable(made):
            raise ConfigError(f"the reward {name!r} needs a function that makes it, got {type(made).__name__}")
        _OWN[name] = made
        return made

    return register if make is None else register(make)


def reward_names() -> list[str]:
    """All names, sorted."""
    return sorted({*VERIFIERS, *_OWN, *_GIVEN.now})


def make_reward(name: str) -> Callable[..., Any]:
    """The reward function of that name. Raises KeyError for an unknown one."""
    given = _GIVEN.now
    return given[name] if name in given else (_OWN[name] if name in _OWN else VERIFIERS[name])()
