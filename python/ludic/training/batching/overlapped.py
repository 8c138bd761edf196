"""Generates the next batches while the trainer trains on the current one.

With `max_lag=1`, generation of batch k + 1 starts when the trainer receives batch k, with the
weights that the trainer is about to change; the batch is one version old when it is trained on.
With `max_lag=2`, two batches are in progress. At most `max_lag` batches are started ahead, so no
batch is older than `max_lag` versions. A step saves at most the shorter of its generation and
training times, and only if sampler and trainer do not share cores or a device.

    max_lag=1   sampler   0 1 2 3          batch k + 1 is sampled while batch k is trained
                trainer     0 1 2 3

The samples are off-policy by `max_lag` steps. `mismatch/*` then includes both the change of the
policy and the difference between the engines. The clip of the loss bounds their effect, or a
correction does (`loss.correction`).
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
"""Key in the batch's meta: duration of its generation in seconds."""


@dataclass
class _PendingBatch:
    """A batch that is being generated, or that is waiting for the trainer."""

    task: asyncio.Task[SAWBatch] | None = None
    state_before: dict[str, Any] | None = None
    """The source's state before its generation; None until that starts."""


class OverlappedSource(BatchSourceBase):
    """Generates the batches of `inner`, one after another, up to `max_lag` batches ahead of the
    trainer.

    >>> source = OverlappedSource(RolloutBatchSource(...), max_lag=1)
    >>> await Trainer(batch_source=source, ...).train(100)
    >>> await source.aclose()

    **Resuming.** A checkpoint has the state of `inner` before the oldest batch that the trainer has
    not received, so every prompt is trained on exactly once, even if the run is interrupted.
    Pending batches are generated again, with the newer weights. For this, the state that `inner`
    returns from `state_dict` must determine its next prompts. Example: the trainer has batch 3, and
    4 and 5 are pending; the checkpoint has the state before 4.

    **Errors.** The error of a batch is raised when the trainer requests that batch. The generation
    of later batches is stopped, and the failed batch comes next again. Cancelling `next_batch`
    stops all generation.

    **Weights.** While batches overlap, the trainer computes in a thread. A client in this process
    must have its own copy of the weights (`LocalChatClient(copy_model=True)`), since the trainer's
    weights change while it samples.

    `num_batches`: how many more batches the run needs. Batches beyond it are generated only on
    request.
    """

    def __init__(self, inner: BatchSource, *, max_lag: int = 1, num_batches: int | None = None) -> None:
        if max_lag < 0:
            raise ConfigError(f"max_lag ({max_lag}) must be >= 0; 0 generates each batch on request")
        self._inner = as_batch_source(inner)
        self.max_lag = max_lag
        self.overlaps = max_lag > 0
        self.shards_across_ranks = self._inner.shards_across_ranks
        self._remaining = num_batches
        self._pending: deque[_PendingBatch] = deque()
        self._turn = asyncio.Lock()
        """Held during the generation of a batch, so that batches are generated one at a time and in
        order."""

    async def next_batch(self) -> SAWBatch:
        """Return the oldest pending batch, after starting the generation of the next ones."""
        if not self._pending:
            self._start_next()
        oldest = self._pending[0].task
        assert oldest is not None
        try:
            batch = await oldest
        except BaseException:
            await self.aclose()
            raise
        self._pending.popleft()
        self._remaining = None if self._remaining is None else self._remaining - 1
        while len(self._pending) < self.max_lag and (self._remaining is None or len(self._pending) < self._remaining):
            self._start_next()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The inner source's state before the oldest pending batch."""
        before = self._pending[0].state_before if self._pending else None
        return self._inner_state() if before is None else copy.deepcopy(before)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises ConfigError while batches are pending, since they belong to
        the previous state."""
        if self._pending:
            raise ConfigError("batches are pending; close the source (`aclose`) before you set its state")
        self._inner.load_state_dict(state)

    def limit(self, num_batches: int) -> None:
        """Set how many more batches the run needs."""
        self._remaining = num_batches

    async def aclose(self) -> None:
        """Stop generation, and reset the inner source to its state before the oldest pending
        batch."""
        before = self._pending[0].state_before if self._pending else None
        tasks = [entry.task for entry in self._pending if entry.task is not None]
        for task in tasks:
            task.cancel()
        self._pending.clear()
        await asyncio.gather(*tasks, return_exceptions=True)
        if before is not None:
            self.load_state_dict(before)

    def _start_next(self) -> None:
        entry = _PendingBatch()
        self._pending.append(entry)
        entry.task = asyncio.create_task(self._generate(entry))

    async def _generate(self, entry: _PendingBatch) -> SAWBatch:
        async with self._turn:
            entry.state_before = copy.deepcopy(self._inner_state())
            started = time.perf_counter()
            batch = await self._inner.next_batch()
            batch.meta[GENERATION_S] = time.perf_counter() - started
            return batch

    def _inner_state(self) -> dict[str, Any]:
        return self._inner.state_dict() or {}
