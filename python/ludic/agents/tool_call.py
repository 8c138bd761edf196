"""Runs a tool that a model called, with a deadline and without blocking other episodes."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from ludic.errors import DataError, LudicError
from ludic.event_loop import await_if_needed, run_in_daemon_thread


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
