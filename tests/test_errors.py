"""Exceptions can be caught by their standard Python types; values are checked by rules."""

import inspect
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import ludic.errors
from ludic.errors import ConfigError, DataError, LudicError, MissingExtraError, check_value, on_error, shorten_names

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


@pytest.mark.parametrize(
    ("value", "rules", "message"),
    [
        (0, {"least": 1}, "must be at least 1"),
        (1.5, {"above": 0, "most": 1}, "must be above 0 and at most 1"),
        (1, {"least": 0, "below": 1}, "must be at least 0 and below 1"),
        (float("inf"), {"above": 0, "below": float("inf")}, "must be above 0 and finite"),
        (float("nan"), {"least": 0}, "must be at least 0"),
        (float("-inf"), {"below": float("inf")}, "must be finite"),
        (True, {"whole": True, "least": 0}, "must be a whole number, at least 0"),
        (2.0, {"whole": True}, "must be a whole number"),
        (None, {"least": 0}, "must be at least 0"),
        ("1", {"least": 0}, "must be at least 0"),
        (np.array([1, 2]), {"least": 0}, "must be at least 0"),
        (torch.tensor([1, 2]), {"least": 0}, "must be at least 0"),
        ("fulll", {"choices": ("auto", "full")}, "must be one of auto, full; did you mean full?"),
        (None, {"choices": ("auto",)}, "must be one of auto"),
    ],
)
def test_a_value_that_breaks_a_rule_is_named_with_the_rule_and_the_hint(value, rules, message):
    with pytest.raises(ConfigError) as caught:
        check_value("x", value, "leave it out", **rules)
    assert str(caught.value) == f"x ({value!r}) {message}; leave it out"
    with pytest.raises(DataError):
        check_value("x", value, error=DataError, **rules)


@pytest.mark.parametrize(
    ("value", "rules"),
    [
        (1, {"whole": True, "least": 1}),
        (np.float32(0.5), {"above": 0, "below": 1}),
        (Fraction(1, 2), {"most": 1}),
        (Decimal("0.5"), {"above": 0, "below": float("inf")}),
        (torch.tensor(0.5), {"least": 0, "most": 1}),
        ("auto", {"choices": ("auto",)}),
        (None, {"optional": True, "whole": True, "least": 1}),
        (None, {"optional": True, "choices": ("auto",)}),
        ([], {}),
    ],
)
def test_a_value_that_keeps_its_rules_is_accepted(value, rules):
    check_value("x", value, **rules)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_an_error_or_an_interrupt_leaves_is_undone(error):
    undone = []
    with on_error(lambda: undone.append("after success")):
        pass
    with pytest.raises(error, match="first"), on_error(lambda: undone.append("after an error")):
        raise error("first")
    assert undone == ["after an error"]
