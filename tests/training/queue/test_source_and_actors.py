"""Whole runs over a log, in virtual time: nothing is lost, trained twice or trained otherwise."""

import pytest
from queue_runs import Plan, simulate


def all_numbers(plan):
    return list(range(plan.steps * plan.groups_per_batch))


@pytest.mark.parametrize("order", ["exact", "arrival"])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_an_undisturbed_run_trains_each_group_once(order, ahead):
    plan = Plan(order=order, ahead=ahead)
    run = simulate(plan)
    assert sorted(run.numbers) == all_numbers(plan)
    assert run.redone == 0
    if order == "exact":
        assert run.numbers == all_numbers(plan)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("order", ["exact", "arrival"])
def test_kills_at_any_call_lose_and_double_nothing_and_redo_the_same_steps(order, seed):
    plan = Plan(order=order, seed=seed, calls_between_kills=50)
    run = simulate(plan)
    assert run.kills["trainer"] > 0
    assert sum(run.kills.values()) > 5
    assert sorted(run.numbers) == all_numbers(plan)
    assert run.redone_differently == 0
    if order == "exact":
        assert run.weights == simulate(Plan()).weights


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("order", ["exact", "arrival"])
def test_lost_data_and_lost_answers_cost_generation_only(order, seed):
    plan = Plan(order=order, seed=seed, calls_between_kills=80, unreachable_rate=0.03, data_losses=3)
    run = simulate(plan)
    assert run.kills["trainer"] > 0
    assert sorted(run.numbers) == all_numbers(plan)
    if order == "exact":
        assert run.redone_differently == 0
        assert run.weights == simulate(Plan()).weights
