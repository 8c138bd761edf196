"""Runs a tool that a model called: with a deadline, and without holding up the other episodes."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ludic.errors import DataError, LudicError


class ToolTimeoutError(LudicError, TimeoutError):
    """A tool that gave no result before its deadline."""


def call_name(call: Mapping[str, Any]) -> str:
    """The name of the tool that an OpenAI tool call asks for; empty where it names none."""
    function = call.get("function")
    return str(function.get("name") or "") if isinstance(function, Mapping) else ""


def call_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an OpenAI tool call, which are a JSON object as text; none at all is an
    empty one.

    Raises DataError for anything else, and JSONDecodeError for text that is no JSON.
    """
    given = call["function"].get("arguments")
    arguments = json.loads(given) if isinstance(given, str) and given.strip() else given or {}
    if not isinstance(arguments, dict):
        raise DataError(f"the arguments must be a JSON object, got {arguments!r}")
    return arguments


async def run_tool(tool: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float | None) -> Any:
    """The tool's result. A coroutine function runs on the event loop; any other function in a
    thread of its own, which goes on by itself if the deadline passes: Python cannot stop it.

    Raises what the tool raises, and ToolTimeoutError after `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            if inspect.iscoroutinefunction(tool):
                return await tool(**arguments)
            result = await _in_own_thread(lambda: tool(**arguments))
            return await result if inspect.isawaitable(result) else result
    except TimeoutError:
        if deadline.expired():
            raise ToolTimeoutError(f"no result within {timeout_s} s") from None
        raise


async def _in_own_thread(call: Callable[[], Any]) -> Any:
    """Not one of the loop's own pool: a few tools that hang would use it up, and the interpreter
    would wait for them at its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((result, error))

    def work() -> None:
        result, failure = None, None
        try:
            result = context.run(call)
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="tool", daemon=True).start()
    result, error = await done
    if error is not None:
        raise error
    return result
