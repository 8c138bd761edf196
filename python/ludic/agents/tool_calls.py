"""Calls of tools in OpenAI's format, and with their results as reward functions, reports and pages
show them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from ludic.errors import DataError, LudicError, RolloutError

ToolCall = dict[str, Any]
"""`{"id": ..., "type": "function", "function": {"name": ..., "arguments": JSON text}}`, in OpenAI's
format. A call that could not be read has an `error`, and its `text`."""


class ToolError(LudicError, RuntimeError):
    """A tool failed; the model gets the message after `Error: ` as the result."""


class EpisodeLost(RolloutError):
    """Raised by a tool without which its episode is worth nothing: it fails, and is played again or
    left out like any failed episode."""


class ToolResult(NamedTuple):
    """What the model is told after a call."""

    text: str
    failed: bool = False


def call_name(call: Mapping[str, Any]) -> str:
    """The name of the tool in an OpenAI tool call; empty if there is none."""
    function = call.get("function")
    return str(function.get("name") or "") if isinstance(function, Mapping) else ""


def call_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an OpenAI tool call, parsed from JSON; empty if there are none.

    Raises DataError if they are not a JSON object.
    """
    text = call["function"].get("arguments")
    try:
        arguments = json.loads(text) if isinstance(text, str) and text.strip() else text or {}
    except ValueError as error:
        raise DataError(f"the arguments are not JSON: {error}; they are {text!r:.80}") from error
    if not isinstance(arguments, dict):
        raise DataError(f"the arguments must be a JSON object, got {arguments!r:.80}")
    return arguments


def calls_of(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls of a model call, from the info of its step, each in OpenAI's format and with
    `name`, `arguments` (an object, or the text of one that is not), `result` (a text, or None) and
    `failed`, which is None if the tools are not ludic's."""
    message = info.get("chat_completion")
    calls = (message.get("tool_calls") if isinstance(message, Mapping) else None) or info.get("tool_calls") or ()
    results, failed = info.get("tool_results") or (), info.get("tool_failed") or ()
    columns = zip_longest(*(each if isinstance(each, Sequence) else () for each in (calls, results, failed)))
    return [{**_read(call), "result": result, "failed": has_failed} for call, result, has_failed in columns if call]


def _read(call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        return {"name": "", "arguments": call}
    try:
        arguments: Any = call["text"] if "error" in call else call_arguments(call)
    except (DataError, KeyError, TypeError, AttributeError, RecursionError):
        function = call.get("function")
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
    return {**call, "name": call_name(call), "arguments": arguments}


def describe_call(call: Mapping[str, Any], limit: int = 200) -> str:
    """A call of `calls_of` on one line, such as `look(item="pears") -> 4`."""
    arguments = call["arguments"]
    if isinstance(arguments, Mapping):
        arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False, default=str)}" for name, value in arguments.items())
    parts = (f"{call['name']}({arguments})", *(() if call["result"] is None else (str(call["result"]),)))
    return " -> ".join(_shorten(part, limit) for part in parts)


def describe_failing(infos: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each tool that fails in most of its calls, from the infos of steps: its name, the
    share, and its most frequent error."""
    calls, errors = Counter[str](), Counter[tuple[str, str]]()
    for info in infos:
        for call in calls_of(info):
            calls[call["name"]] += 1
            errors[call["name"], _shorten(str(call["result"]), 160)] += bool(call["failed"])
    lines = []
    for name, count in sorted(calls.items()):
        own = {error: times for (tool, error), times in errors.items() if tool == name}
        if 2 * (failed := sum(own.values())) > count:
            most = max(own, key=lambda error: own[error])
            shown = name or "(a call that cannot be read)"
            lines.append(f"Tool {shown} failed in {failed / count:.0%} of {count:,} logged calls, most often with {most!r}")
    return lines


def _shorten(text: str, limit: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[:limit]}..."
