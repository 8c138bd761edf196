"""The tools of a run: functions that its model may call before it answers, by name in a recipe, and
their limits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludic.agents.react_agent import ReActAgent
from ludic.agents.tool_schema import check_names, tool_schema
from ludic.errors import ConfigError
from ludic.user_objects import GivenNames, import_named

Tool = Callable[..., Any]


@dataclass(frozen=True)
class ToolUse:
    """Plain or coroutine functions that the model may call before each of its answers.

    >>> use = ToolUse((look_up,), max_turns=2)
    >>> use.make_agent(client=client, model="m", ctx=ctx, parser=parser)
    """

    functions: tuple[Tool, ...]
    """What the model is told of each is its name, docstring and type hints."""
    max_turns: int = 4
    """Model calls in which it may call tools; the one after them is the answer."""
    timeout_s: float | None = 30.0
    """Deadline of one tool call. None means no deadline."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a limit that is too small, and for functions that a model cannot
        be told of."""
        if not self.functions:
            raise ConfigError("there are no tools; give at least one function")
        if self.max_turns < 1:
            raise ConfigError(f"max_tool_turns ({self.max_turns}) must be >= 1; to train without tools, leave tools out")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"tool_timeout_s ({self.timeout_s}) must be > 0, or null for tools without a deadline")
        for function in self.functions:
            check_tool(function)
        check_names(self.functions)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What a chat template is given, one for each function."""
        return [tool_schema(function) for function in self.functions]

    def make_agent(self, **settings: Any) -> ReActAgent:
        """The agent of one episode. `settings` are arguments of `Agent`."""
        return ReActAgent(self.functions, self.max_turns + 1, tool_timeout_s=self.timeout_s, **settings)


def check_tool(function: Tool) -> Mapping[str, Any]:
    """The schema of a function. Raises ConfigError for one that a model cannot call, or that has
    no docstring or no type hint for a parameter, which are all that the model is told."""
    schema = tool_schema(function)
    name = function.__name__
    if inspect.isclass(function):
        raise ConfigError(f"the tool {name} is a class; give a function")
    if not (inspect.getdoc(function) or "").strip():
        raise ConfigError(f"the tool {name} has no docstring, by which a model knows what it is for; write one")
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_POSITIONAL for each in parameters.values()):
        raise ConfigError(
            f"the tool {name} takes *arguments, and models pass arguments by name; take a list, such as items: list[str]"
        )
    without = [
        each for each in schema["function"]["parameters"]["properties"] if parameters[each].annotation is inspect.Parameter.empty
    ]
    if without:
        raise ConfigError(
            f"the tool {name} has no type hint for {', '.join(without)}, which a model is told; write one, such as {without[0]}: str"
        )
    return schema


_GIVEN = GivenNames[Tool]("tools")
given_tools = _GIVEN.given


def find_tools(names: Any) -> tuple[Tool, ...]:
    """The functions of the setting `tools`: `module:function`, or a list of these; none for null
    and for an empty list. Raises ConfigError for a name that is not known."""
    listed = [names] if isinstance(names, str) else [] if names is None else names
    if not isinstance(listed, Sequence) or not all(isinstance(name, str) for name in listed):
        raise ConfigError(f"tools ({names!r}) must be module:function, or a list of such names")
    return tuple(map(_find, listed))


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
