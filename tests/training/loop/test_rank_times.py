"""Which rank the others wait for."""

import logging

import pytest

from ludic.training.loop import step_record
from ludic.training.loop.step_record import RankTimes, describe_wait, find_slow


def test_the_wait_is_the_mean_over_ranks():
    assert describe_wait([1.0, 3.0]) == {"ranks/wait_s": 1.0, "ranks/slowest": 1.0}
    assert describe_wait([2.0, 2.0, 2.0]) == {"ranks/wait_s": 0.0, "ranks/slowest": 0.0}
    assert describe_wait([5.0, 1.0, 0.0]) == {"ranks/wait_s": 3.0, "ranks/slowest": 0.0}


@pytest.mark.parametrize(("seconds", "slow"), [([1, 1, 1], None), ([1, 1.4, 1], None), ([1, 1, 1.6], 2), ([0, 0], None)])
def test_a_rank_is_slow_from_one_and_a_half_medians_on(seconds, slow):
    assert find_slow(seconds) == slow


def test_one_process_waits_for_nobody():
    assert RankTimes().compare(3.0, "cpu") == {}


def test_a_rank_that_is_slow_five_times_in_a_row_names_itself_once(monkeypatch, caplog):
    monkeypatch.setattr(step_record.ranks, "is_distributed", lambda: True)
    monkeypatch.setattr(step_record.ranks, "world_size", lambda: 3)
    monkeypatch.setattr(step_record.ranks, "rank", lambda: 2)
    monkeypatch.setattr(step_record.ranks, "max_over_ranks", lambda own, device: [1.0, 1.0, own[2]])
    times = RankTimes()
    with caplog.at_level(logging.ERROR):
        for seconds in [2.0, 2.0, 1.0, *[4.0] * 4]:
            times.compare(seconds, "cpu")
        assert not caplog.records
        for _ in range(3):
            times.compare(4.0, "cpu")
    [record] = caplog.records
    assert "rank 2, on " in record.message
    assert "4.0 times as long" in record.message
