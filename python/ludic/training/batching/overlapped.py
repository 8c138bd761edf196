"""The next batches are generated while this one trains.

With `max_lag=1`, as soon as the trainer has batch k, batch k + 1 is begun with the weights that the
trainer is about to change, and is one version old when it is trained. With `max_lag=2` two are on
the way. More than that no batch can be old: a batch is only begun when so few are ahead of it. What
it gains is at most the shorter of the two times, and only where sampler and trainer do not share
the same cores or the same device.

The samples are off-policy by `max_lag` steps. `mismatch/*` then holds what was learnt meanwhile
beside what the engines differ by, and the clip of the loss acts on it, or a correction does
(`loss.correction`).
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ludic.errors import ConfigError
from ludic.training.batching.source import BatchSourceBase, as_batch_source
from ludic.training.types import BatchSource, SAWBatch

GENERATION_S = "generation_s"
"""In the batch's meta: seconds from its beginning to its end."""


@dataclass
class _OnItsWay:
    """A batch that is being generated, or waits for the trainer."""

    task: asyncio.Task[SAWBatch] | None = None
    before: dict[str, Any] | None = None
    """The source's state before it was begun; None where it was not."""


class OverlappedSource(BatchSourceBase):
    """Batches of `inner`, begun up to `max_lag` batches before the trainer asks for them, one after
    another.

    >>> source = OverlappedSource(RolloutBatchSource(...), max_lag=1)
    >>> await Trainer(batch_source=source, ...).train(100)
    >>> await source.aclose()

    `inner` must draw from its own state (`state_dict`, which is read before each batch) for a
    resumed run to be asked the same: a checkpoint holds the state before the oldest batch that the
    trainer has not been given, so that every prompt is trained exactly once, however the run ends.
    Batches that were on their way are generated anew, by the newer weights.

    An error of a batch is raised where the batch would be given; the ones behind it are stopped,
    and it is the next again. Whoever stops waiting stops the generation. While batches overlap, the
    trainer computes in a thread, and a client in this process must have weights of its own
    (`LocalChatClient(copy_model=True)`): the trainer's change while it samples.

    `num_batches` is how many batches the run still needs; more are begun only if they are asked
    for.
    """

    def __init__(self, inner: BatchSource, *, max_lag: int = 1, num_batches: int | None = None) -> None:
        if max_lag < 0:
            raise ConfigError(f"max_lag ({max_lag}) must be >= 0; 0 begins a batch when it is asked for")
        self._inner = as_batch_source(inner)
        self.max_lag = max_lag
        self.overlaps = max_lag > 0
        self.shards_across_ranks = self._inner.shards_across_ranks
        self._left = num_batches
        self._ahead: deque[_OnItsWay] = deque()
        self._turn = asyncio.Lock()
        """Held by the batch that is being generated: the source draws for one at a time, in
        order."""

    async def next_batch(self) -> SAWBatch:
        """The oldest batch on its way; the next ones are begun before it is given."""
        if not self._ahead:
            self._begin()
        oldest = self._ahead[0].task
        assert oldest is not None
        try:
            batch = await oldest
        except BaseException:
            await self.aclose()
            raise
        self._ahead.popleft()
        self._left = None if self._left is None else self._left - 1
        while len(self._ahead) < self.max_lag and (self._left is None or len(self._ahead) < self._left):
            self._begin()
        return batch

    def state_dict(self) -> dict[str, Any]:
        before = self._ahead[0].before if self._ahead else None
        return self._state() if before is None else copy.deepcopy(before)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError while batches are on their way: they would belong to the state
        before."""
        if self._ahead:
            raise ConfigError("batches are on their way; close the source (`aclose`) before its state is set")
        self._inner.load_state_dict(state)

    def limit(self, num_batches: int) -> None:
        """The run still needs so many batches."""
        self._left = num_batches

    async def aclose(self) -> None:
        """Stop what is on its way; the source goes back to before the oldest of them, if it can."""
        before = self._ahead[0].before if self._ahead else None
        tasks = [entry.task for entry in self._ahead if entry.task is not None]
        for task in tasks:
            task.cancel()
        self._ahead.clear()
        await asyncio.gather(*tasks, return_exceptions=True)
        if before is not None:
            self.load_state_dict(before)

    def _begin(self) -> None:
        entry = _OnItsWay()
        self._ahead.append(entry)
        entry.task = asyncio.create_task(self._generate(entry))

    async def _generate(self, entry: _OnItsWay) -> SAWBatch:
        async with self._turn:
            entry.before = copy.deepcopy(self._state())
            started = time.perf_counter()
            batch = await self._inner.next_batch()
            batch.meta[GENERATION_S] = time.perf_counter() - started
            return batch

    def _state(self) -> dict[str, Any]:
        return self._inner.state_dict() or {}
