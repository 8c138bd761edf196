"""Requests to stop a run."""

import asyncio
import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest
from torch.distributed import HashStore

from ludic.errors import StopRequested
from ludic.launch.rank_environment import STOP_ONCE
from ludic.runs import stop_request
from ludic.runs.stop_request import ImpatientSource, SharedStopRequest, StoppableSource, StopRequest
from ludic.training.batching.source import BatchSourceBase
from ludic.training.ranks.meeting import Meeting
from ludic.training.types import SAWBatch


class Endless:
    async def next_batch(self) -> SAWBatch:
        return SAWBatch(items=[])

    def state_dict(self) -> dict[str, int]:
        return {"at": 3}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_requests_a_stop_and_the_second_interrupts(signum: int) -> None:
    said: list[str] = []
    before = signal.getsignal(signum)
    with StopRequest(said.append) as stop:
        assert not stop
        os.kill(os.getpid(), signum)
        assert stop
        assert stop.signum == signum
        assert len(said) == 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signum)
    assert signal.getsignal(signum) is before


def test_under_slurm_a_sigterm_may_arrive_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STOP_ONCE, "1")
    shown: list[str] = []
    with StopRequest(shown.append) as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


async def test_a_source_ends_after_a_stop_request() -> None:
    with StopRequest(lambda text: None) as stop:
        inner = Endless()
        source = StoppableSource(inner, stop)
        assert (await source.next_batch()).items == []
        assert source.state_dict() == {"at": 3}
        source.load_state_dict({"at": 5})
        assert inner.loaded == {"at": 5}
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(StopRequested):
            await source.next_batch()


class Stopped:
    """A stop that was requested, or not."""

    def __init__(self, wanted=False):
        self.wanted = wanted

    def __bool__(self):
        return self.wanted


class SlowSource(BatchSourceBase):
    """Generates until it is released, or cancelled."""

    def __init__(self):
        self.released, self.cancelled, self.begun = asyncio.Event(), False, asyncio.Event()

    async def next_batch(self):
        self.begun.set()
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return SAWBatch([], {})


async def test_ranks_wait_for_a_batch_in_progress_but_not_for_long(monkeypatch):
    monkeypatch.setattr(stop_request, "STOP_TICK_S", 0.01)
    monkeypatch.setattr(stop_request, "BATCH_PATIENCE_S", 0.05)
    source, stop = SlowSource(), Stopped()
    impatient = ImpatientSource(source, stop)
    waiting = asyncio.ensure_future(impatient.next_batch())
    await source.begun.wait()
    stop.wanted = True
    with pytest.raises(StopRequested, match=r"a batch was not generated within 0.05 s"):
        await waiting
    assert source.cancelled
    stop.wanted = False
    source.released.set()
    assert (await impatient.next_batch()).items == []
    stop.wanted = True
    with pytest.raises(StopRequested, match="the run was asked to stop"):
        await impatient.next_batch()


def test_a_stop_of_one_rank_is_seen_on_all_and_only_its_own_second_signal_ends_it_at_once():
    store = HashStore()
    notes = []
    first, second = (SharedStopRequest(notes.append, Meeting(store, rank, 2)) for rank in range(2))
    assert not first
    assert not second
    second._on_signal(signal.SIGTERM, None)
    assert first
    assert first.signum == signal.SIGTERM
    first._on_signal(signal.SIGINT, None)  # the launcher forwards the signal to all ranks
    assert len(notes) == 2
    with pytest.raises(KeyboardInterrupt):
        first._on_signal(signal.SIGINT, None)
