"""Tools by name, for the `tools` of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ludic.agents.tool_use import Tool
from ludic.errors import ConfigError
from ludic.user_objects import GivenNames, import_named

_GIVEN = GivenNames[Tool]("tools")
given_tools = _GIVEN.given


def find_tools(names: Any) -> tuple[Tool, ...]:
    """The functions of the setting `tools`: `module:function`, or a list of these; none for null
    and for an empty list. Raises ConfigError for a name that is not known."""
    listed = [names] if isinstance(names, str) else [] if names is None else names
    if not isinstance(listed, Sequence) or not all(isinstance(name, str) for name in listed):
        raise ConfigError(f"tools ({names!r}) must be module:function, or a list of such names")
    return tuple(_find(name) for name in listed)


def _find(name: str) -> Tool:
    given = _GIVEN.now
    if name in given:
        return given[name]
    if ":" not in name:
        module, _, function_name = name.rpartition(".")
        module = module or "my_tools"
        raise ConfigError(
            f"tools ({name}) is not known; write module:function, such as {module}:{function_name} for `{function_name}` of "
            f"./{module.replace('.', '/')}.py. A run that "
            "was given the function as an object of a script goes on in that script, with train(resume=True)"
        )
    function: Tool = import_named(name, "tools")
    return function
