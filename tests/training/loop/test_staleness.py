"""Samples that were drawn with older weights than the weights of the training step."""

from ludic.training.loop.staleness import drop_stale, measure_lag
from ludic.training.types import SAWItem


def sample(version=None):
    return SAWItem([1, 2], [1, 1], [0, 1], 1.0, {} if version is None else {"policy_version": version})


def test_samples_of_more_than_max_lag_versions_ago_are_dropped():
    items = [sample(4), sample(5), sample(7), sample()]
    assert drop_stale(items, 7, 2) == items[1:]
    assert drop_stale(items, 7, 0) == items[2:]
    assert drop_stale(items, 7, None) == items


def test_the_lag_is_the_mean_over_the_samples_whose_version_is_known():
    assert measure_lag([sample(4), sample(6), sample()], 7) == 2.0
    assert measure_lag([sample()], 7) is None
