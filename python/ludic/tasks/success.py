"""Which answers are right: one definition for what `ludic train` and `ludic eval` measure, mark
and write."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ludic.errors import ConfigError
from ludic.tasks.episodic import EpisodicTask

REMEDY = "say from which reward on an answer is right with {}=NUMBER"


@dataclass(frozen=True)
class Success:
    """From which total reward on an episode is a success."""

    reward: float | None
    """None: nothing says what is right, such as where the reward is the score of a reward model."""
    is_assumed: bool = False
    """Nobody has said so. It holds as long as every reward is 0 or 1."""

    def holds_for(self, rewards: Iterable[float]) -> float | None:
        """The reward that answers with these rewards are judged by; None where none of them can
        be called right or wrong."""
        if self.is_assumed and not all(reward in (0.0, 1.0) for reward in rewards):
            return None
        return self.reward

    def why_unknown(self, setting: str) -> str:
        """A sentence for a report without an accuracy. `setting`: what would say it."""
        if self.is_assumed:
            return f"No accuracy: rewards other than 0 and 1 were seen; {REMEDY.format(setting)}."
        return f"No accuracy: a score does not say what is right; {REMEDY.format(setting)}."


def success_of(task: EpisodicTask, solved_at: float | None) -> Success:
    """What was asked for, else what the task says. A task that does not say has rewards of 0 and
    1, or no success at all; the score of a reward model never is one. Raises ConfigError for a
    `solved_at` that no reward can be compared with."""
    if solved_at is not None:
        if not math.isfinite(solved_at):
            raise ConfigError(f"solved_at ({solved_at}) must be a finite reward, such as 1 or 0.5")
        return Success(solved_at)
    if task.reward_is_score:
        return Success(None)
    return Success(1.0, is_assumed=True) if task.success_reward is None else Success(task.success_reward)
