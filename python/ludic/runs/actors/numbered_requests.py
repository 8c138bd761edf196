"""Requests by the number of an entry: what an actor plays follows from the run's seed and this
number alone.

Example: 4 prompts a batch, 2 an entry, groups of 3.

    entry     0     1     2     3     4     5
    batch     0     0     1     1     2     2
    prompts   0 1   2 3   0 1   2 3   0 1   2 3

Entry 5 has prompts 2 and 3 of batch 2: 6 requests.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from ludic.recipes.actors import count_prompts_per_entry
from ludic.recipes.schema import Recipe
from ludic.runs.rollouts import TrainingRequests, make_training_requests
from ludic.tasks import EpisodicTask
from ludic.training.types import RolloutRequest


class NumberedRequests:
    """The requests of each entry."""

    def __init__(self, task: EpisodicTask, recipe: Recipe) -> None:
        self._requests: TrainingRequests = make_training_requests(task, recipe.rollout, seed=recipe.seed)
        self._seed, self._group_size = recipe.seed, recipe.rollout.group_size
        self._prompts, self._per_entry = recipe.rollout.prompts, count_prompts_per_entry(recipe)
        self._batch: tuple[int, Sequence[RolloutRequest]] = (-1, ())

    @property
    def episodes_per_entry(self) -> int:
        return self._per_entry * self._group_size

    @property
    def entries_per_batch(self) -> int:
        return self._prompts // self._per_entry

    def __call__(self, number: int) -> list[RolloutRequest]:
        """The requests of entry `number`, group after group. The id of a group follows from its
        place in the run, so that an entry that is played again is the same."""
        batch, part = divmod(number, self.entries_per_batch)
        first = part * self._per_entry
        return [self._with_id(request, batch, first + i // self._group_size) for i, request in enumerate(self._part(batch, part))]

    def _part(self, batch: int, part: int) -> Sequence[RolloutRequest]:
        if self._batch[0] != batch:
            self._requests.batches = batch
            self._batch = batch, self._requests()
        return self._batch[1][part * self.episodes_per_entry : (part + 1) * self.episodes_per_entry]

    def _with_id(self, request: RolloutRequest, batch: int, prompt: int) -> RolloutRequest:
        bits = Random(f"group {self._seed} {batch} {prompt}").getrandbits(128)
        return replace(request, meta={**request.meta, "group_id": str(uuid.UUID(int=bits, version=4))})
