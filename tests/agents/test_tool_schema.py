"""The schema that a model sees of a Python function. Annotations in this file are strings, which a
naive implementation would report as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, Optional

import pytest

from ludic.agents.tool_schema import parse_arg_descriptions, tool_schema
from ludic.errors import ConfigError


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
