"""The formats of TRL's data sets: the columns of each kind, and the rules for a row.

Each kind has two forms. Standard: prompts and completions are text. Conversational: they are lists
of messages, `{"role": "user", "content": "2+2?"}`. All rows of a data set have the same form. Other
columns are kept unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

Row = dict[str, Any]
Kind = Literal["messages", "preference", "unpaired_preference", "prompt_completion", "prompt", "text"]
KINDS: tuple[Kind, ...] = get_args(Kind)
REQUIRED: dict[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "preference": ("chosen", "rejected"),
    "unpaired_preference": ("prompt", "completion", "label"),
    "prompt_completion": ("prompt", "completion"),
    "prompt": ("prompt",),
    "text": ("text",),
}
"""Kind -> required columns. If a data set fits several kinds, the first is used."""
ROLES = ("system", "developer", "user", "assistant", "tool")


def find_dialogue_columns(kind: Kind, row: Mapping[str, Any]) -> list[str]:
    """The columns with text or messages: the required ones, and the optional prompt of a
    preference."""
    columns, prompt = [name for name in REQUIRED[kind] if name != "label"], row.get("prompt")
    # A text prompt next to conversations only repeats their beginning.
    is_repeated = isinstance(prompt, str) and isinstance(row.get("chosen"), list)
    return ["prompt", *columns] if kind == "preference" and prompt is not None and not is_repeated else columns


def find_fault(row: Mapping[str, Any], kind: Kind, *, conversational: bool) -> str | None:
    """The rule that the row breaks, in words; None if it is valid."""
    for name in REQUIRED[kind]:
        if row.get(name) is None:
            return f"it has no {name!r}; it has {', '.join(sorted(k for k, v in row.items() if v is not None)) or 'nothing'}"
    if kind == "unpaired_preference" and not isinstance(row["label"], bool):
        return f"label ({row['label']!r}) must be true or false"
    faults = (_find_value_fault(name, row[name], kind, conversational) for name in find_dialogue_columns(kind, row))
    return next((fault for fault in faults if fault is not None), None)


def _find_value_fault(name: str, value: Any, kind: Kind, conversational: bool) -> str | None:
    if kind == "text" and not isinstance(value, str):
        return f"text must be text, not {_name_type(value)}"
    if kind == "messages" and not isinstance(value, list):
        return f"messages must be a list of messages, not {_name_type(value)}"
    if not isinstance(value, str | list):
        return f"{name} must be text or a list of messages, not {_name_type(value)}"
    if isinstance(value, list) != conversational:
        forms = ("text", "a list of messages")
        return f"{name} is {forms[not conversational]} where the first row has {forms[conversational]}; a data set has one form"
    if not value and name != "completion":
        return f"{name} is empty"
    for number, message in enumerate(value if isinstance(value, list) else ()):
        where = f"{name}[{number}]"
        if not isinstance(message, dict):
            return f"{where} must be a message such as {{'role': 'user', 'content': '...'}}, not {_name_type(message)}"
        if message.get("role") not in ROLES:
            return f"the role of {where} ({message.get('role')!r}) must be one of {', '.join(ROLES)}"
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            return f"the content of {where} must be text, not {_name_type(content)}"
    return None


def drop_empty_keys(kind: Kind, row: Row) -> Row:
    """The row, with messages without empty keys: Arrow gives each message the keys of all messages,
    with null values."""
    row = dict(row)
    for name in find_dialogue_columns(kind, row):
        if isinstance(row[name], list):
            row[name] = [{key: v for key, v in message.items() if v is not None or key == "content"} for message in row[name]]
    return row


def _name_type(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
