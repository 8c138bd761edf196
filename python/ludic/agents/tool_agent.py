"""The base class of agents with tools."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ludic.agents.base_agent import Agent
from ludic.agents.tool_schema import check_names, tool_schema
from ludic.errors import ConfigError, DataError, LudicError
from ludic.event_loop import await_if_needed, run_in_daemon_thread
from ludic.inference.request import InferenceSpec, ToolRequest

logger = logging.getLogger(__name__)

ToolCall = dict[str, Any]
"""`{"id": ..., "type": "function", "function": {"name": ..., "arguments": JSON text}}`, in OpenAI's
format."""


class ToolAgent(Agent):
    """Describes its tools to the model and runs them. A subclass decides when: see `ReActAgent`.

    A tool is a named function or coroutine function; the model sees its parameters and docstring.
    Plain functions run in a thread, one at a time for each agent; tools that several episodes share
    must be thread-safe. If a tool fails, is unknown, or takes longer than `tool_timeout_s`, the
    model gets an error message as its result, the call counts as failed, and the episode continues.
    """

    name = "tool_agent"

    def __init__(self, tools: Sequence[Callable[..., Any]], *, tool_timeout_s: float | None = 30.0, **agent_kwargs: Any) -> None:
        super().__init__(**agent_kwargs)
        if tool_timeout_s is not None and not tool_timeout_s > 0:
            raise ConfigError(f"tool_timeout_s ({tool_timeout_s}) must be > 0, or None for tools without a deadline")
        self.tool_schemas: list[dict[str, Any]] = [tool_schema(tool) for tool in tools]
        self.tool_map: dict[str, Callable[..., Any]] = {tool.__name__: tool for tool in tools}
        check_names(tools)
        self._tool_timeout_s = tool_timeout_s
        self.num_calls = 0
        """Calls of tools so far, or in the present answer for an agent that begins again with
        each."""
        self.num_failed = 0
        """Calls whose result is an error."""

    def _tool_request(self) -> ToolRequest:
        """A request that offers all tools, with `tool_choice` auto."""
        return ToolRequest(tools=self.tool_schemas, tool_choice="auto")

    def _with_tools(self, inference: InferenceSpec | None) -> InferenceSpec:
        """The same settings with token ids requested, because tool calls are trained like any other
        action."""
        spec = inference or InferenceSpec()
        return dataclasses.replace(spec, return_=dataclasses.replace(spec.return_, return_token_ids=True))

    def _extract_openai_message(self, info: Mapping[str, Any]) -> tuple[str | None, list[ToolCall]]:
        """(content, tool calls) of the server's message; (completion, no calls) if the response
        has no OpenAI message."""
        try:
            message = info["raw_response"]["choices"][0]["message"]
            return message.get("content"), list(message.get("tool_calls") or [])
        except (KeyError, IndexError, TypeError, AttributeError):
            return info.get("completion"), []

    async def _run_tool_calls(self, tool_calls: Sequence[ToolCall]) -> list[str]:
        """Run the calls one after another and add each result to the context, errors included.
        Returns the added texts."""
        results = []
        for call in tool_calls:
            text = await self._call_tool(call)
            self._ctx.add_tool_result(str(call.get("id") or ""), call_name(call), text)
            results.append(text)
        return results

    async def _call_tool(self, call: ToolCall) -> str:
        name = call_name(call)
        self.num_calls += 1
        tool = self.tool_map.get(name)
        if tool is None:
            self.num_failed += 1
            return f"Error: Tool {name} not found. The tools are: {', '.join(self.tool_map) or 'none'}."
        try:
            return str(await run_tool(tool, call_arguments(call), self._tool_timeout_s))
        except (Exception, SystemExit) as error:
            self.num_failed += 1
            logger.info("tool %s failed with %s: %s", name, type(error).__name__, error)
            return f"Error executing tool {name}: {type(error).__name__}: {error}"


class ToolTimeoutError(LudicError, TimeoutError):
    """A tool returned no result before its deadline."""


def call_name(call: Mapping[str, Any]) -> str:
    """The name of the tool in an OpenAI tool call; empty if there is none."""
    function = call.get("function")
    return str(function.get("name") or "") if isinstance(function, Mapping) else ""


def call_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an OpenAI tool call, parsed from JSON; empty if there are none.

    Raises DataError if they are not a JSON object, and JSONDecodeError if they are not JSON.
    """
    text = call["function"].get("arguments")
    arguments = json.loads(text) if isinstance(text, str) and text.strip() else text or {}
    if not isinstance(arguments, dict):
        raise DataError(f"the arguments must be a JSON object, got {arguments!r}")
    return arguments


async def run_tool(tool: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float | None) -> Any:
    """Run the tool and return its result. A coroutine function runs on the event loop, any other
    function in its own thread. After the deadline that thread continues, because Python cannot stop
    it.

    Raises what the tool raises, and ToolTimeoutError after `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            if inspect.iscoroutinefunction(tool):
                return await tool(**arguments)
            return await await_if_needed(await run_in_daemon_thread(lambda: tool(**arguments), name="tool"))
    except TimeoutError:
        if deadline.expired():
            raise ToolTimeoutError(f"no result within {timeout_s} s") from None
        raise
