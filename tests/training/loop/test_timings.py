"""Seconds by phase."""

import pytest

from ludic.training.loop.step_record import PhaseTimer, TimeLeft


def test_a_timer_adds_to_the_given_totals_and_counts_a_failing_phase() -> None:
    seconds = {"rollout": 1.0}
    timer = PhaseTimer(seconds)
    timer.add("rollout", 0.5)
    with pytest.raises(ValueError, match="broken"), timer.phase("publish"):
        raise ValueError("broken")
    assert seconds["rollout"] == 1.5
    assert seconds["publish"] == timer.seconds("publish") >= 0


def test_the_time_left_is_that_of_the_steps_left_at_the_pace_of_the_latest() -> None:
    """A first step of 50 s, then 2 s each. After step 11 of 100 the pace is (50 + 10 * 2) / 11 s.
    The window of 20 steps forgets the first: after step 31 it is 2 s, and 69 * 2 = 138 s remain."""
    now = [0.0]
    left = TimeLeft(clock=lambda: now[0])
    assert left.after(1) is None  # `begin` was not called: a loop of one's own
    left.begin(0, 100)
    estimates = {}
    for step in range(1, 101):
        now[0] += 50.0 if step == 1 else 2.0
        estimates[step] = left.after(step)
    assert estimates[11] == pytest.approx(89 * 70 / 11)
    assert estimates[31] == pytest.approx(138.0)
    assert (estimates[100], estimates[31].as_text()) == (0.0, "2m18s")
    left.begin(0, None)
    assert left.after(1) is None
