"""Reward functions and weights of a recipe, and which answers are right by their rewards: the one
definition that `ludic train` and `ludic eval` use."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludic.errors import ConfigError, did_you_mean
from ludic.tasks.episodic import EpisodicTask
from ludic.training.reward_functions import (
    CODE_REWARDS,
    VERIFIERS,
    RewardFunction,
    RewardFunctions,
    TrainerState,
    make_reward,
    reward_names,
)
from ludic.types import Rollout
from ludic.user_objects import import_named


class DataRewards(RewardFunctions):
    """Reward functions of a data set, with the optional members that a function may have."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        *,
        timeout_s: float | None,
        trainer_state: TrainerState | None = None,
        is_eval: bool = False,
    ) -> None:
        super().__init__(functions, weights, plain_timeout_s=timeout_s, trainer_state=trainer_state, is_eval=is_eval)
        if timeout_s is not None:
            self.timeout_s = timeout_s
        prompts = (getattr(function, "system_prompt", None) for function in functions)
        self.system_prompt: str | None = next((prompt for prompt in prompts if prompt), None)
        """The value of the first function that has one."""
        self._row_checks = [function.check_row for function in functions if hasattr(function, "check_row")]

    @property
    def checks_rows(self) -> bool:
        """Whether some function looks at each row before the run."""
        return bool(self._row_checks)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise DataError for a row that some function cannot judge."""
        for check in self._row_checks:
            check(row)

    def for_evaluation(self) -> DataRewards:
        """The same functions and weights, which are told that answers are measured."""
        return DataRewards(
            self.functions, self.weights, timeout_s=self.plain_timeout_s, trainer_state=self.trainer_state, is_eval=True
        )


class NoRewards(DataRewards):
    """No reward function: the reward is 0 until a reward model gives one."""

    def __init__(self) -> None:
        super().__init__([lambda completions: [0.0] * len(completions)], timeout_s=None)
        self.functions, self.weights, self.names = [], [], []

    def for_evaluation(self) -> DataRewards:
        return self

    async def score(self, rollouts: Sequence[Rollout]) -> dict[str, Exception]:
        return {}


def build_rewards(reward: Any, weights: Any, *, timeout_s: float | None, setting: str = "reward") -> DataRewards:
    """The reward functions of a recipe. `reward`: one name, a list of names, or names with their
    weights. A name is `module:function`, a built-in verifier, or a name of `register_reward`.
    `setting` is the setting's name, for errors; the weights' is `setting_weights`."""
    if isinstance(reward, Mapping):
        if weights is not None:
            raise ConfigError(f"{setting} has weights of its own; leave {setting}_weights out, or make {setting} a list of names")
        reward, weights = list(reward), list(reward.values())
    names = [reward] if isinstance(reward, str) else reward
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        known = ", ".join(sorted({*reward_names(), *CODE_REWARDS}))
        raise ConfigError(f"{setting} ({reward!r}) must be module:function, one of {known}, or a list of such names")
    return DataRewards([_function(name, setting) for name in names], _numbers(weights, setting), timeout_s=timeout_s)


def is_one_verifier(reward: Any) -> bool:
    """Whether the reward is one built-in verifier: 1 for a right answer, 0 for any other."""
    names = [reward] if isinstance(reward, str) else list(reward or ())
    return len(names) == 1 and names[0] in VERIFIERS


def _function(name: str, setting: str) -> RewardFunction:
    if ":" not in name:
        if name in reward_names():
            return make_reward(name)
        if name in CODE_REWARDS:
            raise ConfigError(f"{setting} ({name}) runs programs and must be the only reward: write reward={name}, not a list")
        known = sorted({*reward_names(), *CODE_REWARDS})
        raise ConfigError(f"{setting} ({name}) must be module:function or one of {', '.join(known)}{did_you_mean(name, known)}")
    function = import_named(name, setting)
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"{setting} ({name}) is {'a class' if callable(function) else type(function).__name__}, not a function")
    return function


def _numbers(weights: Any, setting: str) -> list[float] | None:
    if weights is None:
        return None
    listed = [weights] if isinstance(weights, int | float) else weights
    if not isinstance(listed, Sequence) or not all(isinstance(w, int | float) and not isinstance(w, bool) for w in listed):
        raise ConfigError(f"{setting}_weights ({weights!r}) must be a list of numbers, one for each reward function")
    return [float(weight) for weight in listed]


SCORE_REMEDY = "eval_reward=MODULE:FUNCTION rewards held-out answers by what is"
REMEDY = "set the reward from which an answer is right with {}=NUMBER"


@dataclass(frozen=True)
class Success:
    """The total reward from which an episode is a success."""

    reward: float | None
    """None if the reward does not say which answers are right, for example a reward model's
    score."""
    is_assumed: bool = False
    """Not configured, but assumed; valid as long as every reward is 0 or 1."""

    def holds_for(self, rewards: Iterable[float]) -> float | None:
        """The threshold for answers with these rewards; None if they cannot be called right or
        wrong."""
        if self.is_assumed and not all(reward in (0.0, 1.0) for reward in rewards):
            return None
        return self.reward

    def why_unknown(self, setting: str) -> str:
        """A sentence for a report without an accuracy. `setting`: the one that would define it."""
        if self.is_assumed:
            return f"No accuracy: some rewards are neither 0 nor 1; {REMEDY.format(setting)}."
        return f"No accuracy: a score does not say what is right; {SCORE_REMEDY}."


def success_of(task: EpisodicTask, solved_at: float | None, *, judged: bool = False) -> Success:
    """The success of `solved_at` if it is set, else the task's. A task that defines none is assumed
    to have rewards of 0 and 1; the score of a reward model defines no success. `judged`: a reward
    model is to be added to the task. Raises ConfigError for a `solved_at` that is not finite, and
    for one of scores."""
    is_score = task.reward_is_score or (judged and isinstance(task.scorer, NoRewards))
    if solved_at is not None:
        if is_score:
            raise ConfigError(f"solved_at ({solved_at:g}) cannot be used with a reward model; set eval_reward=MODULE:FUNCTION")
        if not math.isfinite(solved_at):
            raise ConfigError(f"solved_at ({solved_at}) must be a finite reward, such as 1 or 0.5")
        return Success(solved_at)
    if is_score:
        return Success(None)
    return Success(1.0, is_assumed=True) if task.success_reward is None else Success(task.success_reward)
