"""Ctrl-C ends a run after the current step, with everything saved."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from ludic.errors import StopRequested
from ludic.launch.rank_environment import STOP_ONCE
from ludic.training import ranks
from ludic.training.batching.source import PENDING_PATIENCE_S, BatchSourceBase, as_batch_source
from ludic.training.ranks.meeting import Meeting
from ludic.training.types import BatchSource, SAWBatch
from ludic.user_objects import forward_members

BATCH_PATIENCE_S = 8.0
"""How long several ranks wait for a batch after a stop was requested."""
STOP_TICK_S = 0.5
"""How often a stop is looked for while a batch is generated."""


class Interrupted(Exception):
    """The run was stopped by a request, and its progress is saved."""


class StopRequest:
    """While entered, the first Ctrl-C or SIGTERM makes it true and the second raises
    KeyboardInterrupt."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.signum: int | None = None
        self._notify = notify
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signum is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self and not _is_repeated(signum):
            raise KeyboardInterrupt
        self.signum = signum
        self._notify("Stopping after this step; press Ctrl-C again to stop at once.")


class SharedStopRequest(StopRequest):
    """A stop of all ranks: a signal to one of them is seen on all."""

    def __init__(self, notify: Callable[[str], None], meeting: Meeting) -> None:
        super().__init__(notify)
        self._meeting = meeting
        self._was_signalled = False
        """Whether this rank itself got a signal."""

    def __bool__(self) -> bool:
        if self.signum is None:
            self.signum = self._meeting.requested_stop()
        return self.signum is not None

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        if self._previous and any(raised):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher ends all ranks after one: this one must still say why

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self._was_signalled and not _is_repeated(signum):
            raise KeyboardInterrupt
        self._was_signalled = True
        self.signum = signum
        self._meeting.request_stop(signum)
        self._notify("Stopping all ranks after this step.")


def make_stop_request(notify: Callable[[str], None]) -> StopRequest:
    """The stop request of this process, or of all ranks after `ranks.start`."""
    meeting = ranks.current_meeting()
    return StopRequest(notify) if meeting is None else SharedStopRequest(notify, meeting)


def _is_repeated(signum: int) -> bool:
    """Whether the signal may be one that came before, by another way."""
    return signum == signal.SIGTERM and os.environ.get(STOP_ONCE) == "1"


@forward_members("_inner", ["use_check"])
class StoppableSource(BatchSourceBase):
    """A batch source that raises StopRequested once a stop was requested. Its state is that of
    the inner source."""

    def __init__(self, source: BatchSource, stop: StopRequest) -> None:
        inner = self._inner = as_batch_source(source)
        self._stop = stop
        self.overlaps, self.max_lag = inner.overlaps, inner.max_lag
        self.shards_across_ranks, self.pairs_incomplete = inner.shards_across_ranks, inner.pairs_incomplete
        self.divided_by_trainer = inner.divided_by_trainer

    async def next_batch(self) -> SAWBatch:
        if self._stop:
            raise StopRequested("the run was asked to stop")
        return await self._inner.next_batch()

    def state_dict(self) -> dict[str, Any] | None:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)

    async def finish_pending(self, timeout_s: float = PENDING_PATIENCE_S) -> None:
        await self._inner.finish_pending(timeout_s)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def unshard(self) -> None:
        self._inner.unshard()
        self.shards_across_ranks = self._inner.shards_across_ranks

    async def checkpoint_saved(self) -> None:
        await self._inner.checkpoint_saved()


class ImpatientSource(StoppableSource):
    """A `StoppableSource` that does not finish a batch that takes longer than `BATCH_PATIENCE_S`
    after a stop: other ranks, and a launcher that ends what does not stop, wait for it. A resumed
    run generates the batch again."""

    async def next_batch(self) -> SAWBatch:
        batch = asyncio.ensure_future(super().next_batch())
        stopped_at: float | None = None
        try:
            while not batch.done():
                await asyncio.wait([batch], timeout=STOP_TICK_S)
                stopped_at = time.monotonic() if stopped_at is None and self._stop else stopped_at
                if stopped_at is not None and time.monotonic() - stopped_at > BATCH_PATIENCE_S:
                    break
        finally:
            if not batch.done():
                batch.cancel()
                await asyncio.wait([batch])
        if batch.cancelled():
            raise StopRequested(f"the run was asked to stop, and a batch was not generated within {BATCH_PATIENCE_S:g} s")
        return batch.result()
