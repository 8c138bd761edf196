"""JSON lines from any values: nothing in a record can prevent it from being written."""

import json
from datetime import date
from enum import Enum

import numpy as np
from hypothesis import given, strategies as st

from ludic.files.json_values import DEEPEST, encode_lines, is_finite
from ludic.types import Step


def write_and_read(record):
    (line,) = encode_lines([record])
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return json.loads(line, parse_constant=lambda name: f"not JSON: {name}")


class RaisesInRepr:
    def __str__(self):
        raise OSError("no")

    __repr__ = __str__


class Endless:
    """`tolist` returns the object itself."""

    def tolist(self):
        return self


class Colour(Enum):
    RED = "red"


def self_containing():
    info = {"kept": 1}
    info["itself"] = info
    return info


def nested(levels):
    value = "the bottom"
    for _ in range(levels):
        value = [value]
    return value


HOSTILE = {
    "contains itself": self_containing(),
    "nested": nested(100_000),
    "cannot be shown": RaisesInRepr(),
    "endless": Endless(),
    "long": 10**5000,
    "more than 64 bits": -(2**70),
    "no number": float("nan"),
    "half a pair": "\ud83d",
    "keys of its own": {(): 1, None: 2},
}
ordinary = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3) | st.just(np.arange(2)) | st.just(Colour.RED)
names = st.sampled_from(sorted(HOSTILE))  # by name, because hypothesis prints what it draws
shapes = st.recursive(
    ordinary | names, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
)


def build(shape):
    if isinstance(shape, list):
        return [build(part) for part in shape]
    if isinstance(shape, dict):
        return {key: build(part) for key, part in shape.items()}
    return HOSTILE.get(shape, shape) if isinstance(shape, str) else shape


@given(st.dictionaries(st.text(max_size=3), shapes, max_size=3))
def test_every_record_becomes_one_line_with_its_keys(shape):
    assert set(write_and_read(build(shape))) == set(shape)


def test_values_that_cannot_be_written_are_replaced_in_place(caplog):
    record = {"info": self_containing(), "error": RaisesInRepr(), "long": 10**5000, "endless": Endless(), "day": date(2026, 1, 2)}
    step = Step(0, "see", "do", None, 0.5, False, True, info=record, ts_ns=7)
    encoded = write_and_read({"steps": [step], "loss": float("nan"), "ids": np.arange(3), "half": "\ud83d"})
    assert encoded == {
        "steps": [
            {
                "index": 0,
                "prev_obs": "see",
                "action": "do",
                "next_obs": None,
                "reward": 0.5,
                "truncated": False,
                "terminated": True,
                "info": {
                    "info": {"kept": 1, "itself": "<this dict contains itself>"},
                    "error": "<this RaisesInRepr cannot be written: OSError>",
                    "long": "<an integer of 16610 bits>",
                    "endless": "<this Endless cannot be written: RecursionError>",
                    "day": "2026-01-02",
                },
                "trace": None,
                "ts_ns": 7,
            }
        ],
        "loss": None,
        "ids": [0, 1, 2],
        "half": "\ud83d",
    }
    assert "1 records hold what cannot be written" in caplog.text


def test_deep_nesting_is_cut_at_a_readable_depth():
    encoded = write_and_read({"deep": nested(100_000)})["deep"]
    depth = 0
    while isinstance(encoded, list):
        (encoded,) = encoded
        depth += 1
    assert (depth, encoded) == (DEEPEST - 1, f"<nested deeper than {DEEPEST} levels>")


def test_many_such_records_give_one_warning(caplog):
    assert len(list(encode_lines([{"info": self_containing()}] * 40))) == 40
    assert [record.getMessage()[:10] for record in caplog.records] == ["40 records"]


def test_a_finite_number_is_one_that_a_float_can_hold():
    assert all(map(is_finite, [0, -2.5, 10**308]))
    assert not any(map(is_finite, [10**309, float("nan"), float("-inf"), True, "1", None]))
