"""Exceptions can be caught by their standard Python types."""

import inspect
import re

import pytest

import ludic.errors
from ludic.errors import LudicError, MissingExtraError, shorten_names

STANDARD = {
    "ConfigError": ValueError,
    "BudgetError": ValueError,
    "DataError": ValueError,
    "DataTypeError": TypeError,
    "DataKeyError": KeyError,
    "MissingExtraError": ImportError,
    "RolloutError": RuntimeError,
    "InferenceError": RuntimeError,
    "NonFiniteError": RuntimeError,
    "EmptyBatchError": RuntimeError,
    "CheckpointError": RuntimeError,
}


@pytest.mark.parametrize(("name", "standard"), STANDARD.items())
def test_an_error_is_a_ludic_error_and_a_standard_exception(name, standard):
    error = getattr(ludic.errors, name)
    assert issubclass(error, LudicError)
    assert issubclass(error, standard)


def test_no_error_is_only_a_ludic_error():
    errors = {name for name, found in inspect.getmembers(ludic.errors, inspect.isclass) if issubclass(found, LudicError)}
    standard = (ValueError, TypeError, ImportError, RuntimeError, KeyError)
    assert {name for name in errors if not issubclass(getattr(ludic.errors, name), standard)} == {"LudicError"}


def test_the_error_of_a_missing_extra_names_the_install_command():
    error = MissingExtraError.for_extra("wandb", "wandb")
    assert isinstance(error, ImportError)
    assert re.search(r"wandb .*`pip install 'ludic-rl\[wandb\]'`", str(error))


def test_a_message_lists_the_first_names_and_counts_the_rest():
    assert shorten_names(["a", "b"]) == "a, b"
    assert shorten_names({3: 1, 4: 1}, limit=1) == "3 and 1 more"
    assert shorten_names([]) == ""
