"""Describes Python functions as tools in OpenAI's function format, and reads the arguments of their
calls by the same type hints.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ludic.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", type(None): "null"}
ARRAYS = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)
OBJECTS = (dict, collections.abc.Mapping)
UNIONS = (Union, types.UnionType)


def tool_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """The function's name, docstring and parameters, without `*args` and `**kwargs`.

    Types are read from the annotations, including string annotations: `int`, `float`, `bool`,
    lists, dictionaries, `Literal` (an enum) and `Optional` (`nullable`). Other types, such as
    enumerations, dates and data classes, are as pydantic describes them; those that it does not
    know are strings. An object with a `tool_schema` of its own has that one. The description of a
    parameter is a string in its `Annotated`, or its entry in the docstring's `Args:`. Parameters
    without a default are required; defaults that JSON can represent are included.

    Raises ConfigError for what a model cannot call: an object without `__name__`, or a function
    with positional-only parameters.
    """
    own: dict[str, Any] | None = getattr(tool, "tool_schema", None)
    if own is not None:
        return own
    parameters, hints = _parameters(tool), _hints(tool)
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


def read_arguments(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, as the types of the tool's hints. JSON has to be of the type that a
    hint names: the text "3" is no integer. What has no hint, and is of a type that pydantic does
    not know, stays as it is.

    Raises DataError for an argument that is missing, unknown, or of another type.
    """
    if getattr(tool, "tool_schema", None) is not None:
        return dict(arguments)
    parameters, hints = _parameters(tool), _hints(tool)
    takes_more = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(tool).parameters.values())
    for name in arguments:
        if name not in parameters and not takes_more:
            known = ", ".join(parameters)
            raise DataError(f"there is no argument {name}; {f'the arguments are {known}' if known else 'it takes none'}")
    for name, parameter in parameters.items():
        if name not in arguments and parameter.default is parameter.empty:
            raise DataError(f"the argument {name} is missing")
    return {name: _read(name, value, hints.get(name, Any), parameters.get(name)) for name, value in arguments.items()}


def _read(name: str, value: Any, hint: Any, parameter: inspect.Parameter | None) -> Any:
    from pydantic import PydanticUserError, TypeAdapter, ValidationError  # takes long to import

    if parameter is None or (value is None and parameter.default is None):
        return value
    try:
        adapter = TypeAdapter(hint)
    except (PydanticUserError, NameError, TypeError):
        return value
    try:
        return adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
    place, wrong = f"argument {name}", value
    key: Any
    for key in faults[0]["loc"]:  # of a union it also names the member, which is no place in the value
        if (isinstance(wrong, list) and isinstance(key, int)) or (isinstance(wrong, dict) and key in wrong):
            place, wrong = f"{place}[{key!r}]", wrong[key]
    rules = dict.fromkeys(
        f"must have {fault['loc'][-1]!r}"
        if fault["type"] == "missing"
        else str(fault["msg"]).replace("Input should be", "must be")
        for fault in faults
    )
    raise DataError(f"{place} {' or '.join(rules).replace('or must be', 'or')}, got {wrong!r:.80}")


def _hints(tool: Callable[..., Any]) -> dict[str, Any]:
    """The type hints by parameter."""
    try:
        return get_type_hints(tool, include_extras=True)
    except Exception:
        return {name: _hint(tool, name, annotation) for name, annotation in inspect.get_annotations(tool).items()}


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
    if isinstance(hint, type) and hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    return _describe_other(hint) or {"type": "string"}


def _describe_other(hint: Any) -> dict[str, Any]:
    """The schema of a type that JSON lacks; empty for one that pydantic does not know."""
    from pydantic import PydanticUserError, TypeAdapter

    try:
        return TypeAdapter(hint).json_schema()
    except (PydanticUserError, NameError, TypeError):
        return {}


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
