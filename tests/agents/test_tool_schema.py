"""The schema that a model sees of a Python function. Annotations in this file are strings, which a
naive implementation would report as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from enum import Enum
from functools import partial
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given, strategies as st

from ludic.agents.tool_schema import parse_arg_descriptions, read_arguments, tool_schema
from ludic.errors import ConfigError, DataError


def schema_of(tool):
    parameters = tool_schema(tool)["function"]["parameters"]
    assert parameters["type"] == "object"
    return parameters["properties"], parameters["required"]


def add(a: int, b: float = 0.5, *, exact: bool = False):
    """Add two numbers.

    The second may be left out.
    """
    return a + b


def test_a_schema_has_name_docstring_and_parameters():
    assert tool_schema(add) == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.\n\nThe second may be left out.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "number", "default": 0.5},
                    "exact": {"type": "boolean", "default": False},
                },
                "required": ["a"],
            },
        },
    }


def test_types_follow_from_the_annotations():
    def tool(
        text: str,
        maybe: Optional[int],  # noqa: UP045
        either: int | str,
        side: Literal["x", "o"],
        level: Literal[1, 2, None],
        numbers: list[int],
        pairs: list[list[float]],
        point: tuple[float, ...],
        names: Sequence[str],
        bare: list,
        counts: dict[str, int],
        anything: Any,
        unannotated,
        size: Annotated[int, "in pixels"],
        huge: Annotated[int | None, "bytes"] = None,
    ): ...

    properties, required = schema_of(tool)
    assert properties == {
        "text": {"type": "string"},
        "maybe": {"type": "integer", "nullable": True},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "side": {"type": "string", "enum": ["x", "o"]},
        "level": {"type": "integer", "enum": [1, 2], "nullable": True},
        "numbers": {"type": "array", "items": {"type": "integer"}},
        "pairs": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "point": {"type": "array", "items": {"type": "number"}},
        "names": {"type": "array", "items": {"type": "string"}},
        "bare": {"type": "array", "items": {}},
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
        "anything": {"type": "string"},
        "unannotated": {"type": "string"},
        "size": {"type": "integer", "description": "in pixels"},
        "huge": {"type": "integer", "nullable": True, "description": "bytes"},
    }
    assert required == [name for name in properties if name != "huge"]


def test_only_json_serialisable_defaults_are_in_the_schema():
    def tool(a: int = 1, b: str = None, c: object = object(), d: list[int] = [1], e: float = float("inf")): ...  # noqa: B006, RUF013

    properties, required = schema_of(tool)
    assert properties["a"] == {"type": "integer", "default": 1}
    assert properties["b"] == {"type": "string", "nullable": True}
    assert properties["c"] == {"type": "string"}
    assert properties["d"] == {"type": "array", "items": {"type": "integer"}, "default": [1]}
    assert properties["e"] == {"type": "number"}
    assert required == []


def test_positional_only_and_variadic_parameters_are_left_out():
    def tool(a: int, *rest: int, **more: int): ...

    assert schema_of(tool) == ({"a": {"type": "integer"}}, ["a"])


def test_an_unresolvable_annotation_does_not_affect_the_others(caplog):
    def tool(a: int, b: Elsewhere): ...  # noqa: F821

    assert schema_of(tool)[0] == {"a": {"type": "integer"}, "b": {"type": "string"}}
    assert re.search("parameter b of tool tool .*a string", caplog.text)


class Store:
    def look(self, key: str) -> str:
        return key


def test_methods_do_not_have_self_in_their_schema():
    schema = tool_schema(Store().look)
    assert schema["function"]["name"] == "look"
    assert schema["function"]["description"] == "No description provided."
    assert schema["function"]["parameters"]["required"] == ["key"]


@pytest.mark.parametrize(("tool", "rule"), [(partial(add, 1), "__name__"), (3, "__name__"), (len, "positional-only")])
def test_a_function_that_a_model_cannot_call_is_refused(tool, rule):
    with pytest.raises(ConfigError, match=rule):
        tool_schema(tool)


def test_a_docstring_describes_each_parameter():
    def look(city: str, days: int = 1, exact: Annotated[bool, "to the degree"] = False, unit="C"):
        """The weather of the next days.

        Args:
            city (str): Where to look,
                as a name: no postal code.
            days: How many days.
            exact: Not this one.

        Returns:
            text: A table.
        """

    found = tool_schema(look)["function"]
    assert found["description"].startswith("The weather of the next days.")
    assert found["parameters"]["properties"] == {
        "city": {"type": "string", "description": "Where to look, as a name: no postal code."},
        "days": {"type": "integer", "default": 1, "description": "How many days."},
        "exact": {"type": "boolean", "default": False, "description": "to the degree"},
        "unit": {"type": "string", "default": "C"},
    }


@pytest.mark.parametrize("doc", ["", "Adds.", "Args:", "Args:\n\n", "args:\n    a: no heading", "Args:\n    nothing here"])
def test_a_docstring_of_another_style_describes_no_parameter(doc):
    assert parse_arg_descriptions(doc) == {}


class Side(Enum):
    LEFT = "left"
    RIGHT = "right"


@dataclass
class Point:
    x: int
    y: float = 0.0


def place(
    count: int = 0,
    ratio: float = 0.0,
    exact: bool = False,
    names: list[str] | None = None,
    either: int | str = 0,
    mode: Literal["x", "o"] = "x",
    when: date | None = None,
    side: Side = Side.LEFT,
    point: Point | None = None,
    size: tuple[int, ...] = (),
    plain: int = None,  # noqa: RUF013
    store: Store | None = None,
    unhinted=None,
): ...


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("count", 3, 3),
        ("ratio", 3, 3.0),
        ("names", None, None),
        ("names", ["a"], ["a"]),
        ("either", "a", "a"),
        ("when", "2024-02-29", date(2024, 2, 29)),
        ("side", "right", Side.RIGHT),
        ("point", {"x": 1}, Point(1)),
        ("size", [1, 2], (1, 2)),
        ("plain", None, None),
        ("store", {"a": [1]}, {"a": [1]}),  # of a type that is not known
        ("unhinted", [1], [1]),
    ],
)
def test_an_argument_has_the_type_of_its_hint(name, value, read):
    assert read_arguments(place, {name: value}) == {name: read}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("count", "three", "argument count must be a valid integer, got 'three'"),
        ("count", "3", "argument count must be a valid integer, got '3'"),
        ("count", True, "argument count must be a valid integer, got True"),
        ("count", None, "argument count must be a valid integer, got None"),
        ("exact", "true", "argument exact must be a valid boolean, got 'true'"),
        ("names", ["a", 3], "argument names[1] must be a valid string, got 3"),
        ("either", [1], "argument either must be a valid integer or a valid string, got [1]"),
        ("mode", "z", "argument mode must be 'x' or 'o', got 'z'"),
        ("when", "2024-02-30", "argument when must be a valid date in the format YYYY-MM-DD"),
        ("side", "up", "argument side must be 'left' or 'right', got 'up'"),
        ("point", {"x": "1"}, "argument point['x'] must be a valid integer, got '1'"),
        ("point", {"y": 1}, "argument point must have 'x', got {'y': 1}"),
        ("other", 1, "there is no argument other; the arguments are count, ratio, exact"),
    ],
)
def test_an_argument_of_another_type_is_told_in_words(name, value, said):
    with pytest.raises(DataError) as raised:
        read_arguments(place, {name: value})
    assert str(raised.value).startswith(said)


def test_types_that_json_lacks_are_described():
    properties, _ = schema_of(place)
    assert properties["when"] == {"type": "string", "format": "date", "nullable": True}
    assert properties["side"]["enum"] == ["left", "right"]
    assert properties["point"]["required"] == ["x"]
    assert properties["store"] == {"type": "string", "nullable": True}


def test_missing_and_further_arguments():
    def look(key: str, **more): ...

    def now(): ...

    with pytest.raises(DataError, match="the argument key is missing"):
        read_arguments(look, {"other": 1})
    assert read_arguments(look, {"key": "a", "other": 1}) == {"key": "a", "other": 1}
    with pytest.raises(DataError, match="there is no argument a; it takes none"):
        read_arguments(now, {"a": 1})


jsons = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([name for name in place.__annotations__ if name != "return"]), jsons)
def test_any_json_is_read_or_refused_and_reading_is_by_the_json_type(name, value):
    try:
        read = read_arguments(place, {name: value})[name]
    except DataError as error:
        read = str(error)
        refused = True
    else:
        refused = False
    if refused:
        assert read.startswith(f"argument {name}")
        assert name not in ("store", "unhinted")
    elif name in ("count", "exact", "mode"):
        assert (type(read), read) == (type(value), value)


def test_an_iterable_is_read_while_the_tool_iterates():
    def total(numbers: Iterable[int]) -> int:
        return sum(numbers)

    assert total(**read_arguments(total, {"numbers": [1, 2]})) == 3
