"""The episodes of one call of the engine, their outcomes, and the report of failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from ludic.errors import LudicError, RolloutError
from ludic.interaction.containment import describe_error
from ludic.training.rollouts.check import GarbageError
from ludic.training.rollouts.played import EpisodeFailure, PlayedRollouts, RolloutCounts
from ludic.training.types import RolloutRequest
from ludic.types import Rollout

logger = logging.getLogger(__name__)

SHOWN_FAILURES = 3
"""How many failures of a batch are logged in full."""


@dataclass
class Episode:
    """One episode to play, and its outcome."""

    index: int
    """Its number among all episodes of the engine."""
    request: RolloutRequest
    rollouts: list[Rollout] = field(default_factory=list)
    error: Exception | None = None
    retries: int = 0
    task: asyncio.Task[None] | None = None
    cancelled: bool = False
    """Whether it was cancelled because another episode of its group failed."""

    @property
    def group(self) -> object:
        """Key of its group; an episode without a `group_id` is a group by itself."""
        group = self.request.meta.get("group_id")
        return ("episode", self.index) if group is None else ("group", group)


def group_episodes(episodes: Sequence[Episode]) -> dict[object, list[Episode]]:
    """Return the episodes of each group, in order of first appearance."""
    groups: dict[object, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode)
    return groups


def count_episodes(episodes: Sequence[Episode]) -> RolloutCounts:
    """Count the outcomes of the episodes."""
    failed = [episode for episode in episodes if episode.error is not None]
    return RolloutCounts(
        num_episodes=len(episodes),
        num_retried_episodes=sum(episode.retries > 0 for episode in episodes),
        num_failed_episodes=len(failed),
        num_cancelled_episodes=sum(episode.cancelled for episode in episodes),
        num_dropped_groups=len({episode.group for episode in failed}),
    )


def drop_failed_groups(episodes: Sequence[Episode], counts: RolloutCounts) -> PlayedRollouts:
    """Return the rollouts of the groups in which no episode failed, and log the failures. Raises
    RolloutError if all groups failed.

    Example: 4 episodes in groups a a b b with 2 agents each; the last episode failed. The result
    has the 4 rollouts of group a, which are 4 / 2 = 2 per episode; `num_requested` is 2 * 4 = 8.
    """
    failed = [episode for episode in episodes if episode.error is not None]
    failed_groups = {episode.group for episode in failed}
    retained = [episode for episode in episodes if episode.group not in failed_groups]
    _log_failures(failed)
    first = failed[0].error if failed else None
    failures = [_describe_failure(episode) for episode in failed]
    # An error refers to its frames, and these refer to the episode: a reference cycle that would
    # keep environments alive.
    for episode in episodes:
        episode.error = episode.task = None
    if first is not None and not retained:
        raise (GarbageError if isinstance(first, GarbageError) else RolloutError)(
            f"{len(failed)} of {len(episodes)} episodes failed and no complete group is left; "
            f"the first error was {describe_error(first)}",
            played=PlayedRollouts([], counts, failures, num_requested=len(episodes)),
        ) from first
    rollouts = [rollout for episode in retained for rollout in episode.rollouts]
    per_episode = len(rollouts) / len(retained) if retained else 1.0  # several agents give several rollouts
    return PlayedRollouts(rollouts, counts, failures, num_requested=round(per_episode * len(episodes)))


def _log_failures(failed: Sequence[Episode]) -> None:
    """Log the first `SHOWN_FAILURES` errors. An error from users' code has its traceback when it
    first occurs."""
    seen: set[str] = set()
    for episode in failed[:SHOWN_FAILURES]:
        error = episode.error
        message = str(error) if isinstance(error, LudicError) else describe_error(error)
        times = f"{episode.retries + 1} times" if episode.retries else "once"
        foreign = error.__cause__ if isinstance(error, LudicError) else error
        is_known = foreign is None or isinstance(foreign, LudicError) or describe_error(foreign) in seen
        trace = None if is_known else foreign
        seen.add(describe_error(foreign))
        logger.error("episode %d failed %s; its group is dropped: %s", episode.index, times, message, exc_info=trace)
    if len(failed) > SHOWN_FAILURES:
        logger.error("%d more episodes failed", len(failed) - SHOWN_FAILURES)


def _describe_failure(episode: Episode) -> EpisodeFailure:
    played = episode.rollouts[0].steps if episode.rollouts else []
    return EpisodeFailure(
        episode_idx=episode.index,
        env_kind=episode.request.env.kind,
        env_seed=episode.request.env_seed,
        error=describe_error(episode.error),
        attempts=episode.retries + 1,
        meta=dict(episode.request.meta),
        seen=played[-1].prev_obs if played else None,
        answer=played[-1].action if played else None,
    )
