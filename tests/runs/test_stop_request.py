"""Requests to stop a run."""

import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from ludic.errors import StopRequested
from ludic.runs.stop_request import StoppableSource, StopRequest
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
