"""Every member of a batch source that is read, with its default.

A user's source needs `next_batch` alone (`training.types.BatchSource`); `as_batch_source` gives it
the rest where it enters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludic.training.types import BatchSource, SAWBatch


class BatchSourceBase:
    """Gives macro-batches. A subclass overrides `next_batch`, and of the rest what it needs."""

    max_lag: int = 0
    """How many batches are begun before the trainer asks for them."""
    overlaps: bool = False
    """Whether batches are generated while the trainer computes, which it then does in a thread."""
    shards_across_ranks: bool | None = None
    """Whether each rank is given samples of its own. False: all are given the same. None:
    unknown."""
    pairs_incomplete: int = 0
    """Incomplete preference pairs that the source has dropped."""

    async def next_batch(self) -> SAWBatch:
        """The next macro-batch. Raises RequestsExhausted or StopAsyncIteration where there is
        none."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any] | None:
        """What checkpoints keep, as plain JSON values; None for a source without state."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""

    async def aclose(self) -> None:
        """Stop what runs in the background."""


def as_batch_source(source: BatchSource) -> BatchSourceBase:
    """`source` itself where it has every member, else an adapter around it."""
    return source if isinstance(source, BatchSourceBase) else _AdaptedSource(source)


class _AdaptedSource(BatchSourceBase):
    """A user's source: `next_batch`, and of the other members those that it has."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.max_lag = getattr(source, "max_lag", 0)
        self.overlaps = getattr(source, "overlaps", False)
        self.shards_across_ranks = getattr(source, "shards_across_ranks", None)
        self.pairs_incomplete = getattr(source, "pairs_incomplete", 0)

    async def next_batch(self) -> SAWBatch:
        batch: SAWBatch = await self._source.next_batch()
        return batch

    def state_dict(self) -> dict[str, Any] | None:
        return dict(self._source.state_dict()) if hasattr(self._source, "state_dict") else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if hasattr(self._source, "load_state_dict"):
            self._source.load_state_dict(state)

    async def aclose(self) -> None:
        if hasattr(self._source, "aclose"):
            await self._source.aclose()
