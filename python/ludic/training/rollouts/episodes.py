"""Episodes of one call: what is to be played, what became of it, and how that is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from ludic.errors import LudicError, RolloutError
from ludic.interaction.containment import message_of
from ludic.training.rollouts.check import GarbageError
from ludic.training.rollouts.played import EpisodeFailure, PlayedRollouts, RolloutCounts
from ludic.training.types import RolloutRequest
from ludic.types import Rollout

logger = logging.getLogger(__name__)

SHOWN_FAILURES = 3
"""Failures of a batch that are logged in full."""


@dataclass
class Episode:
    """One episode to play, and what became of it."""

    index: int
    """Among all episodes of this engine."""
    request: RolloutRequest
    rollouts: list[Rollout] = field(default_factory=list)
    error: Exception | None = None
    retries: int = 0
    task: asyncio.Task[None] | None = None
    cancelled: bool = False
    """Not played to its end, because its group was lost already."""

    @property
    def group(self) -> object:
        """Its group; an episode without one is a group of its own."""
        group = self.request.meta.get("group_id")
        return ("episode", self.index) if group is None else ("group", group)


def count_episodes(episodes: Sequence[Episode]) -> RolloutCounts:
    failed = [episode for episode in episodes if episode.error is not None]
    return RolloutCounts(
        num_episodes=len(episodes),
        num_retried_episodes=sum(episode.retries > 0 for episode in episodes),
        num_failed_episodes=len(failed),
        num_cancelled_episodes=sum(episode.cancelled for episode in episodes),
        num_dropped_groups=len({episode.group for episode in failed}),
    )


def without_failed_groups(episodes: Sequence[Episode], counts: RolloutCounts) -> PlayedRollouts:
    """What the episodes of groups gave in which none failed. Raises RolloutError when there were
    episodes and none is left."""
    failed = [episode for episode in episodes if episode.error is not None]
    lost = {episode.group for episode in failed}
    kept = [episode for episode in episodes if episode.group not in lost]
    _log_failures(failed)
    first = failed[0].error if failed else None
    failures = [_failure(episode) for episode in failed]
    for episode in episodes:  # an error refers to its frames, and they to the episode: a circle that would keep environments
        episode.error = episode.task = None
    if first is not None and not kept:
        raise (GarbageError if isinstance(first, GarbageError) else RolloutError)(
            f"{len(failed)} of {len(episodes)} episodes failed and no complete group is left; "
            f"the first error was {message_of(first)}"
        ) from first
    rollouts = [rollout for episode in kept for rollout in episode.rollouts]
    each = len(rollouts) / len(kept) if kept else 1.0  # an episode of several agents gives several
    return PlayedRollouts(rollouts, counts, failures, num_requested=round(each * len(episodes)))


def _log_failures(failed: Sequence[Episode]) -> None:
    """Each error, and the traceback of what is not ours the first time that it comes."""
    seen: set[str] = set()
    for episode in failed[:SHOWN_FAILURES]:
        error = episode.error
        said = str(error) if isinstance(error, LudicError) else message_of(error)
        times = f"{episode.retries + 1} times" if episode.retries else "once"
        foreign = error.__cause__ if isinstance(error, LudicError) else error
        shown = None if foreign is None or isinstance(foreign, LudicError) or message_of(foreign) in seen else foreign
        seen.add(message_of(foreign))
        logger.error("episode %d failed %s; its group is left out: %s", episode.index, times, said, exc_info=shown)
    if len(failed) > SHOWN_FAILURES:
        logger.error("%d more episodes failed", len(failed) - SHOWN_FAILURES)


def _failure(episode: Episode) -> EpisodeFailure:
    return EpisodeFailure(
        episode_idx=episode.index,
        env_kind=episode.request.env.kind,
        env_seed=episode.request.env_seed,
        error=message_of(episode.error),
        attempts=episode.retries + 1,
        meta=dict(episode.request.meta),
    )
