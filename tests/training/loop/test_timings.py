"""Seconds by phase."""

import pytest

from ludic.training.loop.timings import PhaseTimer


def test_a_timer_adds_to_the_given_totals_and_counts_a_failing_phase() -> None:
    seconds = {"rollout": 1.0}
    timer = PhaseTimer(seconds)
    timer.add("rollout", 0.5)
    with pytest.raises(ValueError, match="broken"), timer.phase("publish"):
        raise ValueError("broken")
    assert seconds["rollout"] == 1.5
    assert seconds["publish"] == timer.seconds("publish") >= 0
