"""Makes the batch of several groups: what `RolloutEngine.generate_batch` does after playing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from ludic.training.algorithm import RLAlgorithm
from ludic.training.queue.entries import Group
from ludic.training.rollouts.engine import select_credit_assigner
from ludic.training.rollouts.log import append_rollouts
from ludic.training.rollouts.played import PlayedRollouts, RolloutCounts
from ludic.training.rollouts.to_samples import batch_from_played
from ludic.training.types import CreditAssigner, SampleFilter, SAWBatch


class BatchFromGroups:
    """Assigns credit over all groups of a batch, filters the samples, and appends the rollouts to
    `jsonl_path`. Credit comes from `credit_assigner`, or else from `algorithm`.

    `rollouts_per_group`: how many a whole group has. It is what a failed group counts as in
    `target_rollouts`.
    """

    def __init__(
        self,
        *,
        rollouts_per_group: int,
        algorithm: RLAlgorithm | None = None,
        credit_assigner: CreditAssigner | None = None,
        sample_filter: SampleFilter | None = None,
        jsonl_path: str | Path | None = None,
    ) -> None:
        self._rollouts_per_group = rollouts_per_group
        self._credit_assigner = select_credit_assigner(algorithm, credit_assigner)
        self._sample_filter = sample_filter
        self._jsonl_path = None if jsonl_path is None else Path(jsonl_path)

    async def __call__(self, groups: Sequence[Group]) -> SAWBatch:
        """The batch of the groups; at least one has rollouts."""
        played = join_groups(groups, self._rollouts_per_group)
        batch = batch_from_played(played, self._credit_assigner, self._sample_filter)
        if self._jsonl_path is not None:
            await asyncio.to_thread(append_rollouts, self._jsonl_path, played)
        return batch


def join_groups(groups: Sequence[Group], rollouts_per_group: int) -> PlayedRollouts:
    """The rollouts of all groups as one call of the engine returns them.

    Example: a group of 4 rollouts and one that failed, with 4 in a group, are 4 of 8 requested.
    """
    counts = RolloutCounts()
    for group in groups:
        counts += group.played.counts
    return PlayedRollouts(
        [rollout for group in groups for rollout in group.played],
        counts,
        [failure for group in groups for failure in group.played.failures],
        num_requested=sum(group.played.num_requested or rollouts_per_group for group in groups),
    )
