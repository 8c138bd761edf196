"""Lines of JSON from anything: nothing that a record holds can stop it from being written."""

import json
from datetime import date
from enum import Enum

import numpy as np
from hypothesis import given, strategies as st

from ludic.files.json_values import DEEPEST, encode_lines
from ludic.types import Step


def written(record):
    (line,) = encode_lines([record])
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return json.loads(line, parse_constant=lambda name: f"not JSON: {name}")


class Unshowable:
    def __str__(self):
        raise OSError("no")

    __repr__ = __str__


class Endless:
    """Its plain form is itself."""

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
    "cannot be shown": Unshowable(),
    "endless": Endless(),
    "long": 10**5000,
    "more than 64 bits": -(2**70),
    "no number": float("nan"),
    "half a pair": "\ud83d",
    "keys of its own": {(): 1, None: 2},
}
ordinary = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3) | st.just(np.arange(2)) | st.just(Colour.RED)
names = st.sampled_from(sorted(HOSTILE))  # by name: hypothesis shows what it draws
shapes = st.recursive(
    ordinary | names, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
)


def filled(shape):
    if isinstance(shape, list):
        return [filled(part) for part in shape]
    if isinstance(shape, dict):
        return {key: filled(part) for key, part in shape.items()}
    return HOSTILE.get(shape, shape) if isinstance(shape, str) else shape


@given(st.dictionaries(st.text(max_size=3), shapes, max_size=3))
def test_every_record_becomes_one_line_with_its_own_keys(shape):
    assert set(written(filled(shape))) == set(shape)


def test_what_cannot_be_written_is_replaced_where_it_stands_and_the_rest_is_kept(caplog):
    record = {"info": self_containing(), "error": Unshowable(), "long": 10**5000, "endless": Endless(), "day": date(2026, 1, 2)}
    step = Step(0, "see", "do", None, 0.5, False, True, info=record, ts_ns=7)
    encoded = written({"steps": [step], "loss": float("nan"), "ids": np.arange(3), "half": "\ud83d"})
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
                    "error": "<this Unshowable cannot be written: OSError>",
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


def test_what_is_nested_without_end_is_cut_at_a_depth_that_can_be_read():
    encoded = written({"deep": nested(100_000)})["deep"]
    depth = 0
    while isinstance(encoded, list):
        (encoded,) = encoded
        depth += 1
    assert (depth, encoded) == (DEEPEST - 1, f"<nested deeper than {DEEPEST} levels>")


def test_a_flood_of_such_records_is_one_warning(caplog):
    assert len(list(encode_lines([{"info": self_containing()}] * 40))) == 40
    assert [record.getMessage()[:10] for record in caplog.records] == ["40 records"]
