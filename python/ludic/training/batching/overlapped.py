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
import base64
import copy
import itertools
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ludic.errors import CheckpointError, ConfigError, DataError, DataTypeError, check_value
from ludic.images.store import ImageError
from ludic.training.batching.sample_codec import VERSION, decode_batch, encode_batch
from ludic.training.batching.source import PENDING_PATIENCE_S, BatchSourceBase, as_batch_source
from ludic.training.rollouts.episodes import SampleCheck
from ludic.training.types import BatchSource, SAWBatch

logger = logging.getLogger(__name__)

PENDING, STATES_AFTER = "pending_batches", "states_after_pending"
"""Keys of the state: the two parts of each pending batch (`sample_codec`) in base64, and the
source's state after each batch."""
GENERATION_S = "generation_s"
"""Key in the batch's meta: duration of its generation in seconds."""


@dataclass
class _PendingBatch:
    """A batch that is being generated, or that is waiting for the trainer."""

    task: asyncio.Task[None] | None = None
    """Its generation; None for a batch of a checkpoint."""
    batch: SAWBatch | None = None
    """The batch, once it is generated."""
    state_before: dict[str, Any] | None = None
    """The source's state before its generation; None until that starts."""
    state_after: dict[str, Any] | None = None
    """The source's state after its generation; None until then."""


class OverlappedSource(BatchSourceBase):
    """Generates the batches of `inner`, one after another, up to `max_lag` batches ahead of the
    trainer.

    >>> source = OverlappedSource(RolloutBatchSource(...), max_lag=1)
    >>> await Trainer(batch_source=source, ...).train(100)
    >>> await source.aclose()

    **Resuming.** The state holds the pending batches that are generated, and the state of `inner`
    before and after each. The trainer waits for them before it saves a checkpoint
    (`finish_pending`), so that a resumed run trains the same batches as one that was not
    interrupted. A batch that is not finished, or whose metadata JSON has no form for, is generated
    again with the newer weights: every prompt is trained exactly once in any case. For this,
    `inner` must draw its prompts from its `state_dict`, which is read before and after each batch.
    Example: the trainer has batch 3, 4 is generated and 5 is not; the state is that before 4,
    batch 4, and the state after it.

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
        check_value("max_lag", max_lag, "0 generates each batch on request", least=0)
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
        oldest = self._pending[0]
        try:
            if oldest.task is not None:
                await oldest.task
        except BaseException:
            await self.aclose()
            raise
        batch = self._pending.popleft().batch
        assert batch is not None
        self._remaining = None if self._remaining is None else self._remaining - 1
        while len(self._pending) < self.max_lag and (self._remaining is None or len(self._pending) < self._remaining):
            self._start_next()
        return batch

    async def finish_pending(self, timeout_s: float = PENDING_PATIENCE_S) -> None:
        """Wait until the pending batches are generated or have failed, so that `state_dict` holds
        them. After `timeout_s` a warning says that it does not."""
        tasks = [entry.task for entry in self._pending if entry.task is not None]
        if tasks and (await asyncio.wait(tasks, timeout=timeout_s))[1]:
            logger.warning(
                "a batch was not generated within %g s; the checkpoint is saved without it, and a resumed run generates it with "
                "newer weights",
                timeout_s,
            )

    def state_dict(self) -> dict[str, Any]:
        """The inner source's state before the oldest pending batch, and the batches that are
        generated, up to the first that is not."""
        before = self._pending[0].state_before if self._pending else None
        state = self._inner_state() if before is None else copy.deepcopy(before)
        generated = self._list_generated()
        if not generated:
            return state
        try:
            batches = [encode_batch(entry.batch, is_exact=True) for entry in generated if entry.batch is not None]
        except (DataError, DataTypeError) as error:
            logger.warning("a checkpoint cannot hold the pending batches (%s); a resumed run generates them again", error)
            return state
        states_after = [copy.deepcopy(entry.state_after) for entry in generated]
        encoded = [[base64.b64encode(part).decode("ascii") for part in parts] for parts in batches]
        return {**state, PENDING: encoded, STATES_AFTER: states_after}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises ConfigError while batches are being generated, since they
        belong to the previous state. Of the stored batches, no more than `max_lag` are taken."""
        if any(entry.task is not None and entry.batch is None for entry in self._pending):
            raise ConfigError("batches are pending; close the source (`aclose`) before you set its state")
        before = {key: value for key, value in state.items() if key not in (PENDING, STATES_AFTER)}
        pending = []
        if PENDING in state:
            stored = zip(_decode_pending(state[PENDING]), state[STATES_AFTER], strict=True)
            for batch, after in itertools.islice(stored, self.max_lag):
                pending.append(_PendingBatch(batch=batch, state_before=before, state_after=after))
                before = after
        self._pending = deque(pending)
        self._inner.load_state_dict(copy.deepcopy(before))

    def use_check(self, check: SampleCheck) -> bool:
        return self._inner.use_check(check)

    def unshard(self) -> None:
        """Return the samples of all ranks from now on, if the inner source can."""
        self._inner.unshard()
        self.shards_across_ranks = self._inner.shards_across_ranks

    def limit(self, num_batches: int) -> None:
        """Set how many more batches the run needs."""
        self._remaining = num_batches

    async def aclose(self) -> None:
        """Stop generation, and reset the inner source to its state before the oldest batch that is
        not generated. Generated batches stay pending."""
        generated = self._list_generated()
        stopped = list(self._pending)[len(generated) :]
        tasks = [entry.task for entry in stopped if entry.task is not None]
        for task in tasks:
            task.cancel()
        self._pending = deque(generated)
        await asyncio.gather(*tasks, return_exceptions=True)
        if stopped and stopped[0].state_before is not None:
            self._inner.load_state_dict(copy.deepcopy(stopped[0].state_before))

    def _list_generated(self) -> list[_PendingBatch]:
        """The pending batches up to the first that is not generated."""
        return list(itertools.takewhile(lambda entry: entry.batch is not None, self._pending))

    def _start_next(self) -> None:
        entry = _PendingBatch()
        self._pending.append(entry)
        entry.task = asyncio.create_task(self._generate(entry))

    async def _generate(self, entry: _PendingBatch) -> None:
        async with self._turn:
            entry.state_before = copy.deepcopy(self._inner_state())
            started = time.perf_counter()
            batch = await self._inner.next_batch()
            batch.meta[GENERATION_S] = time.perf_counter() - started
            entry.state_after = copy.deepcopy(self._inner_state())
            entry.batch = batch

    def _inner_state(self) -> dict[str, Any]:
        return self._inner.state_dict() or {}


def _decode_pending(encoded: Any) -> list[SAWBatch]:
    try:
        if isinstance(encoded, str):
            raise DataError(f"they have version 1, this ludic reads {VERSION}")
        return [decode_batch(*map(base64.b64decode, parts)) for parts in encoded]
    except ImageError:
        raise
    except (DataError, TypeError, ValueError) as error:
        raise CheckpointError(f"the pending batches cannot be read: {error}; resume with the ludic that saved them") from error
