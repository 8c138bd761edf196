"""Which answers are right: the one definition that `ludic train` and `ludic eval` use."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ludic.errors import ConfigError
from ludic.tasks.episodic import EpisodicTask
from ludic.tasks.rewards import NoRewards

SCORE_REMEDY = "eval_reward=MODULE:FUNCTION rewards held-out answers by what is"
REMEDY = "set the reward from which an answer is right with {}=NUMBER"


@dataclass(frozen=True)
class Success:
    """The total reward from which an episode is a success."""

    reward: float | None
    """None: nothing says what is right, for example if the reward is a reward model's score."""
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
            raise ConfigError(
                f"solved_at ({solved_at:g}) cannot tell right answers by the score of a reward model, which says only what is "
                f"better; leave it out, or set a reward that can: {SCORE_REMEDY}"
            )
        if not math.isfinite(solved_at):
            raise ConfigError(f"solved_at ({solved_at}) must be a finite reward, such as 1 or 0.5")
        return Success(solved_at)
    if is_score:
        return Success(None)
    return Success(1.0, is_assumed=True) if task.success_reward is None else Success(task.success_reward)
