"""What stands around the trainer: stopping, timing, thinning of what is shown."""

import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, strategies as st

from ludic.errors import StopRequested
from ludic.runs.stopping import EveryFew, PhaseLogger, StoppableSource, StopRequest, Stopwatch
from ludic.training.types import SAWBatch


class Remembering:
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, Any]]] = []

    def log(self, step: int, stats: Mapping[str, Any]) -> None:
        self.seen.append((step, dict(stats)))


class Endless:
    async def next_batch(self) -> SAWBatch:
        return SAWBatch(items=[])

    def state_dict(self) -> dict[str, int]:
        return {"at": 3}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends_at_once(signum: int) -> None:
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


async def test_a_source_runs_dry_once_a_stop_was_asked_for() -> None:
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


def test_a_stopwatch_adds_up_and_counts_a_phase_that_fails() -> None:
    seconds = {"rollout": 1.0}
    watch = Stopwatch(seconds)
    watch.add("rollout", 0.5)
    with pytest.raises(ValueError, match="broken"), watch.measure("publish"):
        raise ValueError("broken")
    assert seconds["rollout"] == 1.5
    assert seconds["publish"] >= 0


@given(every=st.integers(1, 20), last=st.integers(1, 60))
def test_every_few_steps_are_shown_and_always_the_last(every: int, last: int) -> None:
    inner = Remembering()
    logger = EveryFew(inner, every, last)
    for step in range(1, last + 1):
        logger.log(step, {})
    shown = [step for step, _ in inner.seen]
    assert shown == sorted({*range(every, last + 1, every), last})


def test_the_phase_is_logged_beside_the_statistics() -> None:
    inner = Remembering()
    PhaseLogger(inner, "warm_up").log(4, {"train/loss": 0.5})
    assert inner.seen == [(4, {"phase": "warm_up", "train/loss": 0.5})]
