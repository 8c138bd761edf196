"""`BatchSourceBase`: all members of a batch source that the library reads, with their defaults.

A user's source needs only `next_batch` (`training.types.BatchSource`); `as_batch_source` adds the
other members.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludic.errors import ConfigError
from ludic.training.rollouts.episodes import SampleCheck
from ludic.training.types import BatchSource, SAWBatch
from ludic.user_objects import forward_members

PENDING_PATIENCE_S = 600.0
"""How long a checkpoint waits for batches that are being generated."""
STOP_PATIENCE_S = 20.0
"""How long the last checkpoint of a run does."""
BATCH_NUMBER = "batch_number"
"""Key in a batch's meta: how many batches its source had returned before, batches without samples
included."""


class BatchSourceBase:
    """Returns macro-batches. A subclass overrides `next_batch`, and other members as needed."""

    max_lag: int = 0
    """How many batches are started before the trainer requests them."""
    overlaps: bool = False
    """Whether batches are generated while the trainer computes. The trainer then computes in a
    thread."""
    shards_across_ranks: bool | None = None
    """Whether each rank gets different samples. False if all ranks get the same, None if it is not
    known."""
    divided_by_trainer: bool = False
    """Whether all ranks get the same samples and the trainer divides them over the ranks
    (`SharedBatches`)."""
    pairs_incomplete: int = 0
    """Number of incomplete preference pairs that the source has dropped."""

    async def next_batch(self) -> SAWBatch:
        """The next macro-batch. Raises RequestsExhausted or StopAsyncIteration if there is none."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state for checkpoints, as plain JSON values; None for a source without
        state."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position in `state`."""

    async def finish_pending(self, timeout_s: float = PENDING_PATIENCE_S) -> None:
        """Wait until what runs in the background is in `state_dict`, for at most `timeout_s`
        seconds. A checkpoint is saved next."""

    async def checkpoint_saved(self) -> None:
        """A checkpoint with the last `state_dict` is on disk. What only older ones need can be
        deleted."""

    async def aclose(self) -> None:
        """Stop all background work."""

    def limit(self, num_batches: int) -> None:
        """Set how many more batches the run needs."""

    def use_check(self, check: SampleCheck) -> bool:
        """Refuse with `check` what cannot be trained on, where it comes in: an episode or an entry
        of a queue, and not a whole batch. The trainer calls this before each batch. Returns whether
        the source does so; else the trainer checks its batches."""
        return False

    def unshard(self) -> None:
        """Return the samples of all ranks from now on. `SharedBatches` calls this before the first
        batch. Raises ConfigError for a source that gives each rank its own samples and cannot do
        so."""
        if self.shards_across_ranks:
            raise ConfigError(
                f"{type(self).__name__} gives each rank its own samples (shards_across_ranks), so SharedBatches would use the samples of "
                "rank 0 alone; pass it to the trainer as it is, or let it return all samples"
            )


OPTIONAL_MEMBERS = tuple(name for name in vars(BatchSourceBase) if not name.startswith("_") and name != "next_batch")


def as_batch_source(source: BatchSource) -> BatchSourceBase:
    """Return `source` if it is a BatchSourceBase, else an adapter around it."""
    return source if isinstance(source, BatchSourceBase) else _AdaptedSource(source)


@forward_members("_source", OPTIONAL_MEMBERS)
class _AdaptedSource(BatchSourceBase):
    """A user's source with defaults for the members that it lacks."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    async def next_batch(self) -> SAWBatch:
        return await self._source.next_batch()
