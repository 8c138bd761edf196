"""Deltas of tensors of each dtype: whatever the values, NaNs too, the bits are those that were
encoded."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ludic import _core
from ludic.errors import DataError, DataTypeError

widths = st.sampled_from([1, 2, 4, 8])


@st.composite
def versions(draw: Any) -> tuple[int, Any, Any]:
    """Width of an entry, and the bytes of two versions of a tensor."""
    width, entries, seed = draw(widths), draw(st.integers(0, 300)), draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, width * entries, np.uint8)
    changed = rng.random(len(base)) < draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    return width, base, base ^ (changed * rng.integers(0, draw(st.sampled_from([4, 256])), len(base))).astype(np.uint8)


@given(versions())
def test_a_delta_gives_the_new_bits_and_then_the_old_ones(drawn: tuple[int, Any, Any]) -> None:
    width, base, new = drawn
    delta, target = _core.encode_delta(base, new, width), base.copy()
    if delta is None:
        assert (base == new).all()
        return
    assert len(delta) <= 1 + len(new)
    _core.apply_delta(target, delta, width)
    assert (target == new).all()
    _core.apply_delta(target, delta, width)
    assert (target == base).all()


@given(versions(), st.binary(max_size=40))
def test_bytes_that_are_no_delta_change_nothing(drawn: tuple[int, Any, Any], noise: bytes) -> None:
    width, base, _ = drawn
    target = base.copy()
    try:
        _core.apply_delta(target, np.frombuffer(noise, np.uint8), width)
    except DataError:
        assert (target == base).all()


def test_the_bytes_are_those_of_the_documentation() -> None:
    base, new = np.array([7, 9, 4, 300], np.uint16), np.array([7, 8, 4, 500], np.uint16)
    delta = _core.encode_delta(base.view(np.uint8), new.view(np.uint8), 2)
    assert delta is not None
    assert delta.tolist() == [0, 1, 1, 1, 216, 1]


def test_what_does_not_fit_is_refused() -> None:
    four, six = np.zeros(4, np.uint8), np.zeros(6, np.uint8)
    with pytest.raises(DataError, match=r"base has 4 bytes .* 6"):
        _core.encode_delta(four, six, 2)
    with pytest.raises(DataError, match=r"width \(3\) must be 1, 2, 4 or 8"):
        _core.encode_delta(six, six, 3)
    with pytest.raises(DataError, match=r"entry 2 of .* with 2"):
        _core.apply_delta(four, np.array([0, 2, 1], np.uint8), 2)
    with pytest.raises(DataTypeError, match=r"uint8 array, not .*float64"):
        _core.encode_delta(four, np.zeros(4), 2)  # type: ignore[arg-type]
    with pytest.raises(DataTypeError, match=r"new must be contiguous"):
        _core.encode_delta(four, np.zeros(8, np.uint8)[::2], 2)
    with pytest.raises(DataTypeError, match=r"target must be .* uint8 .*float64"):
        _core.apply_delta(np.zeros(4), four, 2)  # type: ignore[arg-type]
    four.flags.writeable = False
    with pytest.raises(DataTypeError, match=r"target must be .* may be written"):
        _core.apply_delta(four, np.array([0, 1, 1], np.uint8), 2)
