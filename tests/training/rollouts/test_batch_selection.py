"""Which groups leave in which batch, against a slow oracle."""

import itertools

import pytest
from hypothesis import given, strategies as st

from ludic.training.rollouts.batch_selection import ArrivalOrder, SubmissionOrder
from ludic.training.rollouts.group_ledger import Group, GroupState


def group(ordinal, admitted, state=GroupState.OWED):
    return Group(ordinal, ordinal, admitted, [], state=state)


def quotas_met(chosen, kept, batch, size, max_lag):
    """The rule as the design states it, for every number d of batches ahead."""
    for ahead in range(max_lag + 1):
        due = [one for one in kept if one.admitted + max_lag <= batch + ahead]
        if len([one for one in due if one in chosen]) < len(due) - size * ahead:
            return False
    return True


@given(st.integers(1, 3), st.integers(0, 3), st.data())
def test_a_batch_meets_the_quotas_as_soon_as_arrived_groups_can_and_is_the_first_to_arrive(size, max_lag, data):
    """A batch is complete exactly if some N arrived groups meet all quotas; the chosen ones have
    the earliest arrivals of those that do, compared from the last one on."""
    batch = max_lag
    per_batch = data.draw(st.lists(st.integers(0, 3), min_size=max_lag + 1, max_size=max_lag + 1))
    admitted = [j for j, number in enumerate(per_batch) for _ in range(number)]
    kept = [group(i, j) for i, j in enumerate(admitted)]
    for ahead in range(max_lag + 1):  # what admission keeps: no more are due than later batches hold
        due = [one for one in kept if one.admitted + max_lag <= batch + ahead]
        kept = [one for one in kept if one not in due[size * (ahead + 1) :]]
    arrived = data.draw(st.permutations(kept))[: data.draw(st.integers(0, len(kept)))]
    order = ArrivalOrder(size, max_lag)
    for one in kept:
        order.admit(one)
    for one in arrived:
        one.state = GroupState.ARRIVED
        order.arrive(one)
    possible = [
        indices
        for indices in itertools.combinations(range(len(arrived)), size)
        if quotas_met([arrived[i] for i in indices], kept, batch, size, max_lag)
    ]
    assert order.is_complete(batch, size) == bool(possible)
    if possible:
        chosen = order.take(batch, size)
        assert sorted(arrived.index(one) for one in chosen) in [sorted(indices) for indices in possible]
        assert order.list_arrivals() == [one for one in arrived if one not in chosen]


def test_young_groups_do_not_crowd_out_old_ones():
    """N = 2, K = 2, batch 2: four groups of batch 0 and 1 are due within two batches (c(1) = 4), so
    that 4 - 2 = 2 of them leave now although two of batch 2 arrived first."""
    order = ArrivalOrder(2, 2)
    old = [group(0, 1), group(1, 1), group(2, 1), group(3, 1)]
    young = [group(4, 2), group(5, 2)]
    for one in [*old, *young]:
        order.admit(one)
    for one in young:
        order.arrive(one)
    assert not order.is_complete(2, 2)
    for one in old[2:]:
        order.arrive(one)
    assert order.is_complete(2, 2)
    assert order.take(2, 2) == old[2:]


def test_groups_that_are_not_due_leave_in_the_order_of_arrival():
    order = ArrivalOrder(2, 1)
    groups = [group(i, 0) for i in range(4)]
    for one in groups:
        order.admit(one)
    for i in (3, 0, 1):
        order.arrive(groups[i])
    assert order.take(0, 2) == [groups[3], groups[0]]
    assert order.list_arrivals() == [groups[1]]


@pytest.mark.parametrize("dropped", [0, 1])
def test_in_order_of_submission_the_lowest_kept_ordinals_leave(dropped):
    order, groups = SubmissionOrder(), [group(i, 0) for i in range(4)]
    for one in groups:
        order.admit(one)
    for one in groups[2:]:
        one.state = GroupState.ARRIVED
        order.arrive(one)
    assert not order.is_complete(0, 2)
    groups[dropped].state = GroupState.REJECTED
    order.drop(groups[dropped])
    assert not order.is_complete(0, 2)
    other = groups[1 - dropped]
    other.state = GroupState.ARRIVED
    order.arrive(other)
    assert order.take(0, 2) == [other, groups[2]]
    assert order.list_arrivals() == [groups[3]]
