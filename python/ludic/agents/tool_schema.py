"""Describes Python functions as tools in OpenAI's function format.

The descriptions of parameters come from docstrings in Google style:

    Args:
        city (str): Where to look,
            as a name.
"""

from __future__ import annotations

import collections.abc
import inspect
import json
import logging
import re
import types
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ludic.errors import ConfigError

logger = logging.getLogger(__name__)

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", type(None): "null"}
ARRAYS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)
OBJECTS = (dict, collections.abc.Mapping)
UNIONS = (Union, types.UnionType)


def tool_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """The function's name, docstring and parameters, without `*args` and `**kwargs`.

    Types are read from the annotations, including string annotations: `int`, `float`, `bool`,
    lists, dictionaries, `Literal` (an enum) and `Optional` (`nullable`). Types that JSON lacks
    become strings. The description of a parameter is a string in its `Annotated`, or its entry in
    the docstring's `Args:`. Parameters without a default are required; defaults that JSON can
    represent are included.

    Raises ConfigError for what a model cannot call: an object without `__name__`, or a function
    with positional-only parameters.
    """
    parameters = _parameters(tool)
    try:
        hints = get_type_hints(tool, include_extras=True)
    except Exception:
        hints = {name: _hint(tool, name, annotation) for name, annotation in inspect.get_annotations(tool).items()}
    descriptions = parse_arg_descriptions(inspect.getdoc(tool) or "")
    return {
        "type": "function",
        "function": {
            "name": tool.__name__,
            "description": inspect.getdoc(tool) or "No description provided.",
            "parameters": {
                "type": "object",
                "properties": {
                    name: ({"description": descriptions[name]} if name in descriptions else {})
                    | _property_schema(hints.get(name, str), p.default)
                    for name, p in parameters.items()
                },
                "required": [name for name, p in parameters.items() if p.default is p.empty],
            },
        },
    }


def check_names(tools: Sequence[Callable[..., Any]]) -> None:
    """Raises ConfigError for tools that share a name."""
    names = [tool.__name__ for tool in tools]
    if len(set(names)) < len(names):
        raise ConfigError(f"tools {names} share a name; give each its own, because a model calls tools by name")


def _parameters(tool: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    if not callable(tool) or not isinstance(getattr(tool, "__name__", None), str):
        raise ConfigError(f"{tool!r} cannot be a tool, because models call tools by __name__; pass a function that has one")
    parameters = inspect.signature(tool).parameters
    positional_only = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]
    if positional_only:
        raise ConfigError(f"tool {tool.__name__} has positional-only parameters {positional_only}; wrap it to take them by name")
    return {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _hint(tool: Callable[..., Any], name: str, annotation: object) -> Any:
    """The resolved annotation. One that cannot be resolved becomes `str`, with a warning."""
    alone = types.SimpleNamespace(__annotations__={name: annotation})
    try:
        return get_type_hints(alone, globalns=getattr(inspect.unwrap(tool), "__globals__", {}), include_extras=True)[name]
    except Exception as error:
        logger.warning("parameter %s of tool %s is shown to the model as a string: %s", name, tool.__name__, error)
        return str


def _property_schema(hint: Any, default: Any) -> dict[str, Any]:
    schema = _type_schema(hint)
    if default is None:
        schema["nullable"] = True
    elif default is not inspect.Parameter.empty and _is_json(default):
        schema["default"] = default
    return schema


def _type_schema(hint: Any) -> dict[str, Any]:
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        texts = [note for note in args[1:] if isinstance(note, str)]
        return _type_schema(args[0]) | ({"description": texts[0]} if texts else {})
    if origin in UNIONS:  # one type or any of several; None makes it nullable
        others = [_type_schema(arg) for arg in args if arg is not type(None)]
        schema = others[0] if len(others) == 1 else {"anyOf": others}
        return schema | ({"nullable": True} if len(others) < len(args) else {})
    if origin is Literal:
        values = [arg for arg in args if arg is not None]
        kinds = {JSON_TYPES.get(type(value), "string") for value in values}
        schema = {"type": kinds.pop()} if len(kinds) == 1 else {}
        return schema | {"enum": values} | ({"nullable": True} if len(values) < len(args) else {})
    if origin in ARRAYS:
        has_one_type = len({arg for arg in args if arg is not Ellipsis}) == 1
        return {"type": "array", "items": _type_schema(args[0]) if has_one_type else {}}
    if origin in OBJECTS:
        return {"type": "object", "additionalProperties": _type_schema(args[1])} if len(args) == 2 else {"type": "object"}
    return {"type": JSON_TYPES.get(hint, "string") if isinstance(hint, type) else "string"}


def _is_json(value: object) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


_HEADING = re.compile(r"^(Args|Arguments|Parameters):\s*$", re.MULTILINE)
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


def parse_arg_descriptions(doc: str) -> dict[str, str]:
    """Parameter -> description on one line. `doc` must be cleaned (`inspect.getdoc`). Empty for
    docstrings in other styles."""
    heading = _HEADING.search(doc)
    descriptions: dict[str, str] = {}
    level, name = 0, ""
    for line in doc[heading.end() :].splitlines() if heading else ():
        indent = len(line) - len(line.lstrip())
        if line.strip() and indent == 0:
            break  # the next section
        level = level or indent
        entry = _ENTRY.match(line.strip()) if indent == level else None
        if entry:
            name = entry[1]
            descriptions[name] = entry[2]
        elif name and line.strip():
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return {name: description for name, description in descriptions.items() if description}
