import math

import pytest
from hypothesis import given, strategies as st

from ludic.errors import ConfigError, DataError
from ludic.training.coefficients import Coefficient, as_coefficient

FINITE = st.floats(-1e6, 1e6)


@given(FINITE, FINITE, FINITE)
def test_a_coefficient_stays_within_its_bounds(a, b, value):
    least, most = min(a, b), max(a, b)
    coefficient = Coefficient(least, least=least, most=most)
    coefficient.set(value)
    assert float(coefficient) == coefficient.value == min(max(value, least), most)


def test_without_an_upper_bound_it_grows_freely():
    tau = Coefficient(0.1, least=1e-6)
    tau.set(1e9)
    assert float(tau) == 1e9
    tau.set(-1.0)
    assert float(tau) == 1e-6


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_and_changes_nothing(value):
    tau = Coefficient(0.1)
    with pytest.raises(DataError, match="finite"):
        tau.set(value)
    assert float(tau) == 0.1


@pytest.mark.parametrize(
    ("value", "bounds"),
    [(-1, {}), (math.nan, {}), (math.inf, {}), (2, {"most": 1.0}), (0.5, {"least": 1.0, "most": 0.0}), (1, {"most": math.inf})],
)
def test_wrong_values_and_bounds_are_config_errors(value, bounds):
    with pytest.raises(ConfigError):
        Coefficient(value, **bounds)


def test_a_coefficient_is_shared_not_copied():
    tau = Coefficient(0.1)
    assert as_coefficient(tau) is tau
    assert float(as_coefficient(0.25)) == 0.25
    with pytest.raises(ConfigError, match=r"value \(-0.1\) must be at least 0.0"):
        as_coefficient(-0.1)
