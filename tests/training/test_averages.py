"""Means that are 0 where there is nothing to average."""

import numpy as np

from ludic.training.averages import array_mean_or_zero, mean_or_zero


def test_the_mean_of_an_empty_list_is_zero():
    assert mean_or_zero([]) == array_mean_or_zero(np.zeros(0)) == 0.0


def test_the_mean_of_numbers_or_booleans_is_a_float():
    assert mean_or_zero([1, 2]) == 1.5
    assert mean_or_zero([True, False, False, False]) == 0.25
    assert array_mean_or_zero(np.array([True, True, False, False])) == 0.5
    assert type(mean_or_zero([1])) is type(array_mean_or_zero(np.ones(1))) is float
