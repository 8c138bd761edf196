"""Requests to stop a run."""

import os
import signal

import pytest
from torch.distributed import HashStore

from ludic.launch.rank_environment import STOP_ONCE
from ludic.runs.stop_request import StopRequest
from ludic.training.ranks.rendezvous import Rendezvous


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


def test_a_stop_of_one_rank_is_seen_on_all_and_only_its_own_second_signal_ends_it_at_once():
    store = HashStore()
    notes = []
    first, second = (StopRequest(notes.append, Rendezvous(store, rank, 2)) for rank in range(2))
    assert not first
    assert not second
    second._on_signal(signal.SIGTERM, None)
    assert first
    assert first.signum == signal.SIGTERM
    first._on_signal(signal.SIGINT, None)  # the launcher forwards the signal to all ranks
    assert len(notes) == 2
    with pytest.raises(KeyboardInterrupt):
        first._on_signal(signal.SIGINT, None)
