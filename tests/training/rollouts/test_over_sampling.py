"""The figures of over-sampling, in the short form of `benches.python.over_sampling`."""

import pytest
from benches.python.over_sampling import kill_random_runs, measure_call_us, measure_row


@pytest.mark.parametrize(("factor", "max_lag"), [(1.25, 1), (1.5, 1), (1.5, 2), (2.0, 4)])
def test_over_sampling_is_near_its_bound_and_throws_nothing_away(factor, max_lag):
    row = measure_row(factor, max_lag, "arrival", batches=100, whole_groups=True)
    assert row.ratio <= 1.15 * row.bound
    assert row.bias == pytest.approx(1, abs=0.01)
    assert row.thrown_away == 0
    assert row.largest_lag <= max_lag


def test_in_order_of_submission_a_batch_waits_for_its_slowest_group():
    row = measure_row(1.5, 1, "submission", batches=30, whole_groups=True)
    assert row.bound < 0.8 < row.ratio <= 1
    assert row.bias == 1


def test_random_runs_that_are_killed_keep_all_laws():
    totals = kill_random_runs(15)
    assert totals["runs"] == 15
    assert totals["kills"] >= 15
    assert totals["rejected"] > 0 < totals["lost"]
    assert "failed" not in totals


def test_the_cost_of_a_call_can_be_measured():
    assert measure_call_us(4, batches=2) > 0
