"""`SharedBatches`: one source for all ranks. Rank 0 asks it, and all ranks get the same batch.

    rank 0      next_batch of the source ... post "a batch of 27 MB"   broadcast
    the others  wait at the store ......................... read it    broadcast

The wait is not a collective, since generation may take longer than the group's timeout. The trainer
then divides each mini-batch over the ranks (`rank_plans`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ludic.errors import ConfigError, StopRequested
from ludic.training import ranks
from ludic.training.batching.batch_columns import decode_columns, encode_columns
from ludic.training.batching.source import PENDING_PATIENCE_S, BatchSourceBase, as_batch_source
from ludic.training.ranks.collectives import broadcast_bytes, group_device
from ludic.training.rollouts.check import SampleCheck
from ludic.training.types import BatchSource, SAWBatch

BATCH_PATIENCE_S = 3600.0
"""How long a rank waits for rank 0 to get a batch."""
FINISH_GRACE_S = 60.0
"""How much longer than rank 0 the others wait for its pending batches."""


class SharedBatches(BatchSourceBase):
    """Gives all ranks the batches of rank 0's source.

    >>> source = SharedBatches(RolloutBatchSource(...))  # on every rank
    >>> await Trainer(batch_source=source, ...).train(100)

    All ranks make one, in the same order, and call the same methods. Only rank 0's `inner` is used;
    on other ranks it may be None. A source that divides its samples among the ranks is made to
    return all of them (`unshard`), so that a run on N ranks trains the batches of a run on one.
    With one rank it is `inner`.

    Every rank, rank 0 too, gets what was sent: sequences are arrays, metadata are what msgpack
    gives back. An error of the source is raised on all ranks: as the same type where it can be
    built from a message, else as its nearest base class. A batch of rank 0 that does not come
    within `patience_s` is a RankError on the others. If `stop` is true on any rank before a batch
    is requested, that request raises StopRequested on all, as a stop of the run does.

    The state is that of rank 0's source, so that a run resumes on any number of ranks.
    """

    divided_by_trainer = True
    shards_across_ranks = False

    def __init__(
        self, inner: BatchSource | None, *, stop: Callable[[], object] | None = None, patience_s: float = BATCH_PATIENCE_S
    ) -> None:
        if not patience_s > 0:
            raise ConfigError(f"patience_s ({patience_s}) must be > 0 seconds")
        self._source = None if inner is None else as_batch_source(inner)
        self._stop, self._patience_s = stop, patience_s
        facts = ranks.ask_rank_0("preparing the batch source of all ranks", self._prepare)
        self.overlaps, self.max_lag, self.pairs_incomplete = facts
        self._meeting = ranks.current_meeting()
        """None for one process."""
        self._topic = "" if self._meeting is None else self._meeting.open_topic()

    def _prepare(self) -> list[Any]:
        """The members of rank 0's source that all ranks must agree on."""
        self._inner.unshard()
        return [self._inner.overlaps, self._inner.max_lag, self._inner.pairs_incomplete]

    @property
    def _inner(self) -> BatchSourceBase:
        if self._source is None:
            raise ConfigError("rank 0 asks the batch source for all ranks, and it has none; pass it as inner")
        return self._source

    async def next_batch(self) -> SAWBatch:
        """The next batch of rank 0's source."""
        if self._meeting is None:
            self._check_stop()
            return await self._inner.next_batch()
        if ranks.rank() == 0:
            return await self._share_next()
        message = await self._meeting.read(self._topic, "batch", self._patience_s, while_waiting=self._report_stop)
        head, table = [await self._broadcast(None, int(size)) for size in message["sizes"]]
        return decode_columns(head, table)

    async def _share_next(self) -> SAWBatch:
        try:
            self._check_stop()
            parts = encode_columns(await self._inner.next_batch())
        except BaseException as error:  # also if this rank is interrupted: the others would wait for it
            with suppress(RuntimeError):  # of the store; the error itself matters more
                self._post_error(error)
            raise
        self._post("batch", sizes=[len(part) for part in parts])
        head, table = [await self._broadcast(part, len(part)) for part in parts]
        return decode_columns(head, table)

    async def _broadcast(self, content: bytes | None, size: int) -> memoryview:
        """The bytes of rank 0. In a thread where the event loop generates the next batches."""
        device = group_device()  # here, since a thread has a current device of its own
        if self.overlaps:
            return await asyncio.to_thread(broadcast_bytes, content, size, device)
        return broadcast_bytes(content, size, device)

    def _check_stop(self) -> None:
        if self._stop is None:
            return
        if self._stop() or (self._meeting is not None and self._meeting.requested_stop() is not None):
            raise StopRequested("the run was asked to stop")

    def _report_stop(self) -> None:
        """Tell rank 0, which may be about to ask for the next batch."""
        if self._meeting is not None and self._stop is not None and self._stop():
            self._meeting.request_stop(signal.SIGTERM)

    def _post_error(self, error: BaseException) -> None:
        if self._meeting is not None:
            self._meeting.post_error(self._topic, error)

    def _post(self, kind: str, **content: Any) -> None:
        """Tell the other ranks, on rank 0."""
        if self._meeting is not None:
            self._meeting.post(self._topic, kind, **content)

    def use_check(self, check: SampleCheck) -> bool:
        return self._source is not None and self._source.use_check(check)

    def state_dict(self) -> dict[str, Any] | None:
        """The state of the source on rank 0; None on other ranks."""
        return self._inner.state_dict() if ranks.rank() == 0 else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position in `state`, on rank 0."""
        if ranks.rank() == 0:
            self._inner.load_state_dict(state)

    async def finish_pending(self, timeout_s: float = PENDING_PATIENCE_S) -> None:
        """Wait until rank 0's source has finished what runs in the background."""
        if ranks.rank() != 0:
            assert self._meeting is not None
            await self._meeting.read(self._topic, "finished", timeout_s + FINISH_GRACE_S)
            return
        try:
            await self._inner.finish_pending(timeout_s)
        except BaseException as error:
            with suppress(RuntimeError):
                self._post_error(error)
            raise
        self._post("finished")

    async def checkpoint_saved(self) -> None:
        """Tell rank 0's source."""
        if ranks.rank() == 0:
            await self._inner.checkpoint_saved()

    async def aclose(self) -> None:
        """Stop the background work of rank 0's source. Waits for no rank."""
        if ranks.rank() == 0:
            await self._inner.aclose()
