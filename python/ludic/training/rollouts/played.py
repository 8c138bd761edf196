"""The result of a rollout engine: the usable rollouts, and the outcomes of all episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from ludic.types import Rollout


@dataclass
class RolloutCounts:
    """Outcomes of the episodes of one call."""

    num_episodes: int = 0
    num_retried_episodes: int = 0
    """Episodes that failed at least once and were played again."""
    num_failed_episodes: int = 0
    """Episodes that failed after all retries."""
    num_cancelled_episodes: int = 0
    """Episodes cancelled because another episode of their group failed after all retries."""
    num_dropped_groups: int = 0
    """Groups dropped because one of their episodes failed after all retries."""

    def __add__(self, other: RolloutCounts) -> RolloutCounts:
        return RolloutCounts(*(left + right for left, right in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class EpisodeFailure:
    """An episode that failed after all retries."""

    episode_idx: int
    env_kind: str
    env_seed: int | None
    """The seed in the request."""
    error: str
    """Type and message of the last error."""
    attempts: int
    meta: dict[str, Any]
    """The meta of the request."""
    seen: str | None = None
    """The last observation that was answered, of an episode that was played and could not be
    rewarded; None of another."""
    answer: str | None = None
    """The answer to it."""


class PlayedRollouts(list[Rollout]):
    """The usable rollouts in the order of the requests, with the outcomes of all episodes."""

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        counts: RolloutCounts,
        failures: Sequence[EpisodeFailure],
        *,
        num_requested: int | None = None,
    ) -> None:
        """`num_requested`: number of rollouts that were requested; a failed episode counts as many
        as the others returned on average. None: the number of `rollouts`."""
        super().__init__(rollouts)
        self.counts, self.failures = counts, list(failures)
        self.num_requested = len(rollouts) if num_requested is None else num_requested
