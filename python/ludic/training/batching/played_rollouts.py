"""What a rollout engine gives back: the rollouts that can be used, and what became of the other episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Episodes that were not played to their end, because another of their group had failed for good."""
    num_dropped_groups: int = 0
    """Groups left out because an episode of theirs failed for good."""


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


class PlayedRollouts(list[Rollout]):
    """The rollouts that can be used, in the order of the requests, and what became of the other episodes."""

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        counts: RolloutCounts,
        failures: Sequence[EpisodeFailure],
        *,
        num_requested: int | None = None,
    ) -> None:
        """`num_requested`: rollouts that were asked for; an episode that gave none counts as many as the others gave on average. None:
        those that came."""
        super().__init__(rollouts)
        self.counts, self.failures = counts, list(failures)
        self.num_requested = len(rollouts) if num_requested is None else num_requested
