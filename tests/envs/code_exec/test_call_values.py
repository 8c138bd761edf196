"""Values of calls: what comes back of them from a sandbox, and when they equal what is expected."""

import json
import math

import pytest
from hypothesis import given, strategies as st

from ludic.envs.code_exec.calls import Near, OneOf, Same, ValueVerifier
from ludic.envs.code_exec.in_program import encode

scalars = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, -0.0, 1e300]) | st.sampled_from(["", "a", "1"])
)
members = scalars | st.tuples(scalars) | st.frozensets(scalars, max_size=2) | st.binary(max_size=1)
values = st.recursive(
    members | st.sets(members, max_size=3) | st.complex_numbers(max_magnitude=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(members, inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip


def verify(value, expected, **settings):
    """Whether they agree after the way that values take."""
    agrees, details = ValueVerifier(**settings).verify(json.loads(json.dumps(encode(value))), expected)
    assert (details is None) == agrees
    return agrees


@given(values)
def test_a_value_equals_itself(value):
    assert verify(value, value)


@given(values, values)
def test_values_agree_if_python_says_so(one, other):
    assert verify(one, other) == (one == other)


@pytest.mark.parametrize(
    ("value", "expected", "agrees"),
    [
        ((1, 2), [1, 2], False),
        (True, 1, True),
        (math.inf, math.inf, True),
        (math.nan, math.nan, False),
        ("1", 1, False),
        ([1, [2, (3,)]], [1, [2, (3,)]], True),
        ({1: {2}}, {1: {2}}, True),
        ({1: 2, 3: 4}, {1: 2}, False),
        (10**4000, 10**4000, True),
        ({(object(),)}, {(None,)}, False),
        ({frozenset([object()])}, {frozenset([None])}, False),
        ({(object(),): 1}, {("None",): 1}, False),
        (True, Same(True), True),
        (1, Same(True), False),
        (False, Same(True), False),
        (0, Same(False), False),
        (object(), object(), False),
        (1.0000001, Near(1.0, abs_tol=1e-3), True),
        (1.1, Near(1.0, abs_tol=1e-3), False),
        ([1.0, 2.1], Near([1.0, 2.0], rel_tol=0.1), True),
        ("a", Near(1.0, abs_tol=1), False),
        ([3], OneOf(([3], 3)), True),
        (3, OneOf(([3], 3)), True),
        (4, OneOf(([3], 3)), False),
    ],
)
def test_pairs_worked_by_hand(value, expected, agrees):
    assert verify(value, expected) is agrees


def test_numbers_too_long_for_python_to_write():
    """Over 4,300 digits."""
    long = 10**5000
    assert verify(long, long)
    assert verify({(long, 1): [-long]}, {(long, 1): [-long]})
    assert not verify({long}, {1})
    assert not verify(long, 1)
    assert not verify(long, Near(1.0, rel_tol=1.0))


def test_data_sets_in_json_have_lists_alone():
    assert verify(((1, 2),), [[1, 2]], tuples_are_lists=True)
    assert not verify({1, 2}, [1, 2], tuples_are_lists=True)


class Evil:
    def __eq__(self, other):
        return True

    def __hash__(self):
        return hash(1)

    def __repr__(self):
        return "1"


class EvilInt(int):
    def __eq__(self, other):
        return True

    def __repr__(self):
        return "1"

    __hash__ = None


class EvilText(str):
    def __str__(self):
        return "right"


class EvilList(list):
    def __iter__(self):
        return iter([1])

    def __len__(self):
        return 1


@pytest.mark.parametrize(
    ("value", "expected"), [(Evil(), 1), (EvilInt(2), 1), (EvilText("wrong"), "right"), (EvilList([2]), [1]), ([Evil()], [1])]
)
def test_a_class_cannot_say_that_it_equals_anything(value, expected):
    assert not verify(value, expected)


def test_classes_that_derive_from_pythons_own_are_values():
    class Named(dict):
        pass

    assert verify(Named(a=1), {"a": 1})
    assert verify(EvilInt(2), 2)


@pytest.mark.parametrize(
    "written",
    [
        {}, {"list": 3}, {"list": [1], "tuple": [1]}, {"dict": [[1]]}, {"dict": {"a": 1}}, {"set": [[1], [1]]}, {"complex": 1},
        {"bytes": 5}, {"int": "x"}, {"int": 1}, {"set": [{"int": "x"}]}, {"set": [{"tuple": [{"other": "int"}]}]},
        {"other": "int"}, [1], {"": [1]}, {"set": [{"list": [1]}]}, {"tuple": "ab"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("expected", [1, [1], (1,), {1}, {1: 1}, "1", b"1", 1j, frozenset([1]), None])
def test_what_no_value_is_written_as_is_wrong_and_no_error(written, expected):
    agrees, details = ValueVerifier().verify(written, expected)
    assert not agrees
    assert details


def test_a_value_that_is_nested_too_deeply_is_wrong():
    deep = 1
    for _ in range(5000):
        deep = {"tuple": [deep]}
    assert not ValueVerifier().verify({"set": [deep]}, {1})[0]
    assert not ValueVerifier().verify(deep, 1)[0]
    assert not ValueVerifier().verify(deep, Same(True))[0]


def test_many_keys_with_one_hash_cost_no_more_than_others():
    """Integers that differ by the modulus of Python's hashes all have the hash of the first."""
    modulus = 2**61 - 1
    written = {"dict": [[place * modulus, 0] for place in range(2000)]}
    assert not ValueVerifier().verify(written, dict.fromkeys(range(2000)))[0]
