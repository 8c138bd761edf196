"""The tools of a run: functions that its model may call before it answers, and their limits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ludic.agents.react_agent import ReActAgent
from ludic.agents.tool_schema import check_names, tool_schema
from ludic.errors import ConfigError

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
    """Deadline of one tool call; None: there is none."""

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
        """The agent of one episode. `settings` are those of `Agent`."""
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
