"""Parses tool calls in the format of Hermes and Qwen models: `<tool_call>{"name": ...,
"arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
import re
from typing import Any

from ludic.types import Message

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")


def assistant_message(text: str, *, first_id: int = 0) -> Message:
    """The answer as an OpenAI message: `content`, and `tool_calls` if the text has any.

    `content` is then the text before the first call, or None. Ids count up from `first_id` and have
    nine letters and digits, which the strictest templates require. One malformed call makes the
    whole text an answer without calls, as on servers.
    """
    calls = parse_tool_calls(text)
    if not calls:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": text[: text.index(OPENING)].rstrip() or None,
        "tool_calls": [
            {
                "id": f"call{first_id + number:05d}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for number, (name, arguments) in enumerate(calls)
        ],
    }


def parse_tool_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) of every call in the text; empty if one of them is malformed. Never
    raises."""
    calls = []
    start = text.find(OPENING)
    while start >= 0:
        try:
            call, end = _DECODER.raw_decode(text, _skip_space(text, start + len(OPENING)))
        except (ValueError, RecursionError):
            return []
        end = _skip_space(text, end)
        if not text.startswith(CLOSING, end) or not _is_call(call):
            return []
        calls.append((call["name"], call["arguments"]))
        start = text.find(OPENING, end)
    return calls


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return position if match is None else match.end()


def _is_call(call: Any) -> bool:
    """Whether `call` is an object with a name and an object of arguments, and can be encoded as
    JSON text."""
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
        return False
    if not isinstance(call.get("name"), str) or not call["name"]:
        return False
    try:
        json.dumps(call, ensure_ascii=False).encode()  # half of a surrogate pair cannot be encoded
    except (ValueError, RecursionError):
        return False
    return True


def completion_finish_reason(finish_reason: str, message: Message) -> str:
    """`tool_calls`, as in OpenAI's interface, for an answer with tool calls that was not cut off;
    else `finish_reason`."""
    return "tool_calls" if "tool_calls" in message and finish_reason == "stop" else finish_reason


def count_tool_calls(messages: list[Message]) -> int:
    """The number of tool calls in a conversation."""
    return sum(len(message.get("tool_calls") or ()) for message in messages)
