"""What a rollout engine gives back: the rollouts that can be used, and what became of the other
episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from ludic.types import Rollout


@dataclass
class RolloutCounts:
    """What happened to the episodes of one call."""

    num_episodes: int = 0
    num_retried_episodes: int = 0
    """Episodes that failed at least once and were played again."""
    num_failed_episodes: int = 0
    """Episodes that failed for good."""
    num_cancelled_episodes: int = 0
    """Episodes that were not played to their end, because another of their group had failed for
    good."""
    num_dropped_groups: int = 0
    """Groups left out because an episode of theirs failed for good."""

    def __add__(self, other: RolloutCounts) -> RolloutCounts:
        return RolloutCounts(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class EpisodeFailure:
    """An episode that failed for good."""

    episode_idx: int
    env_kind: str
    env_seed: int | None
    """As the request had it."""
    error: str
    """Type and message of the last error."""
    attempts: int
    meta: dict[str, Any]
    """Of the request."""


def ran_out_of_steps(rollouts: Sequence[Rollout]) -> bool:
    """Whether every episode was cut by `max_steps` after an action that its environment took and
    went on from. An episode whose last answer never reached the environment says nothing about
    that."""
    answered = [rollout for rollout in rollouts if rollout.steps and not rollout.steps[-1].info.get("parse_error")]
    return bool(answered) and all(rollout.meta.get("truncation_reason") == "max_steps" for rollout in answered)


class PlayedRollouts(list[Rollout]):
    """The rollouts that can be used, in the order of the requests, and what became of the other
    episodes."""

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        counts: RolloutCounts,
        failures: Sequence[EpisodeFailure],
        *,
        num_requested: int | None = None,
    ) -> None:
        """`num_requested`: rollouts that were asked for; an episode that gave none counts as many
        as the others gave on average. None:
        those that came."""
        super().__init__(rollouts)
        self.counts, self.failures = counts, list(failures)
        self.num_requested = len(rollouts) if num_requested is None else num_requested
