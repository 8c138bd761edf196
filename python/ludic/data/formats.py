"""The formats of rows: the columns of TRL's data sets and the rules for a row, and the formats for
supervised fine-tuning, with how Alpaca's and ShareGPT's rows become conversations.

A kind of TRL's has two forms. Standard: prompts and completions are text. Conversational: they
are lists of messages, `{"role": "user", "content": "2+2?"}`. All rows of a data set have the same
form. Other columns are kept unchanged.

A format for fine-tuning has one column that no other needs: a row has the first format of `FORMATS`
whose column it has. One file has one format, or mixes the formats of this library.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ludic.errors import DataError
from ludic.types import Message

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
        has_parts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
        if has_parts and message["role"] != "assistant":
            continue
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


AUTO = "auto"
FORMATS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "tools", "chat_template_kwargs", "image", "images"),
    "sharegpt": ("conversations", "system", "tools", "chat_template_kwargs", "image", "images"),
    "prompt_completion": ("prompt", "completion", "tools", "chat_template_kwargs", "image", "images"),
    "alpaca": ("instruction", "input", "output", "system", "history", "chat_template_kwargs", "image", "images"),
    "rollout": ("steps",),
    "tokens": ("input_ids", "action_mask"),
    "text": ("text",),
}
"""Format -> the columns that are read. The first one tells the format."""
_MAY_MIX = frozenset(("messages", "prompt_completion", "rollout", "tokens"))

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
"""`from` of a ShareGPT message -> role of a message."""

ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
"""Stanford Alpaca's prompt, for a tokenizer without a chat template."""
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
SHOWN_VALUE = 60
IMAGE_MARKER = "<image>"
"""Where an image is in the text of a ShareGPT or Alpaca row with images."""


def detect_format(row: Mapping[str, Any]) -> str | None:
    """The format of a row; None if it has the column of none. A null counts as no column."""
    return next((name for name, columns in FORMATS.items() if row.get(columns[0]) is not None), None)


def list_formats() -> str:
    """All formats with their columns, for messages."""
    return "; ".join(f"{name}: {', '.join(columns)}" for name, columns in FORMATS.items())


@dataclass
class FormatCount:
    """Counts the formats of one file, and refuses a mixture.

    >>> count = FormatCount("rows.jsonl")
    >>> count.add({"instruction": "Add.", "output": "4", "id": 7}, "rows.jsonl, line 1")
    >>> count.describe()
    'rows.jsonl: 1 row of alpaca (instruction, output); not read: id'
    """

    name: str
    chosen: str = AUTO
    """The format that the settings name; `auto`: each row tells."""
    rows: Counter[str] = field(default_factory=Counter)
    columns: dict[str, None] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    """Format -> the place of its first row."""

    def add(self, row: Mapping[str, Any], where: str) -> None:
        """Count a row. Raises DataError for one without a format, and for one whose format does not
        go with the rows before it."""
        found = detect_format(row) if self.chosen == AUTO else self.chosen
        if found is None:
            raise DataError(f"{where} has the columns {', '.join(row) or '(none)'}, which are no format ({list_formats()})")
        self.rows[found] += 1
        self.columns.update(dict.fromkeys(key for key, value in row.items() if value is not None))
        self.first.setdefault(found, where)
        if len(self.first) > 1 and not _MAY_MIX.issuperset(self.first):
            places = [f"{place} has {name} ({FORMATS[name][0]})" for name, place in list(self.first.items())[:2]]
            raise DataError(f"{' and '.join(places)}; set data_format={next(iter(self.first))}, or write a file of each format")

    def describe(self) -> str:
        """One line: how many rows of which format, the columns that are read, and those that are
        not."""
        parts, used = [], set[str]()
        for name, count in self.rows.items():
            columns = [column for column in FORMATS[name] if column in self.columns]
            used.update(columns, ("id", "meta") if name == "rollout" else ())
            parts.append(f"{count:,} {'row' if count == 1 else 'rows'} of {name} ({', '.join(columns)})")
        unread = [column for column in self.columns if column not in used]
        return f"{self.name}: {', '.join(parts)}" + (f"; not read: {', '.join(unread)}" if unread else "")


def count_formats(rows: Iterable[tuple[str, Mapping[str, Any]]], name: str, chosen: str = AUTO) -> FormatCount:
    """The formats of the `(place, row)` pairs of one file."""
    count = FormatCount(name, chosen)
    for where, row in rows:
        count.add(row, where)
    return count


def convert_alpaca(row: Mapping[str, Any], where: str) -> list[Message]:
    """The conversation of an Alpaca row: `instruction`, a line break and `input` are the user's
    message if there is an input, `output` is the answer. `system` and `history`, a list of
    `[instruction, output]`, come before.

    Example: `{"instruction": "Add.", "input": "2 2", "output": "4"}` becomes user `Add.\\n2 2` and
    assistant `4`.
    """
    question, answer = read_alpaca(row, where)
    messages: list[Message] = []
    if system := _read_text(row, "system", where, default=""):
        messages.append({"role": "system", "content": system})
    for number, turn in enumerate(row.get("history") or [], 1):
        if not isinstance(turn, list | tuple) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise DataError(f"{where}: turn {number} of its history ({_shown(turn)}) must be [instruction, output], two texts")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    messages += [{"role": "user", "content": "\n".join(question)}, {"role": "assistant", "content": answer}]
    return list(map(_split_markers, messages)) if row.get("images") else messages


def _split_markers(message: Message) -> Message:
    """The message with a part for each marker. Example: `<image>How many?` of the user is the parts
    image and `How many?`."""
    pieces = re.split(f"({IMAGE_MARKER})", str(message["content"]))
    if len(pieces) == 1 or message["role"] == "assistant":
        return message
    parts = [{"type": "image"} if piece == IMAGE_MARKER else {"type": "text", "text": piece} for piece in pieces if piece]
    return {**message, "content": parts}


def convert_alpaca_to_text(row: Mapping[str, Any], where: str) -> tuple[str, str]:
    """(prompt, completion) of an Alpaca row, in Stanford Alpaca's words."""
    for column in ("system", "history", "images"):
        if row.get(column):
            raise DataError(f"{where} has {column} ({_shown(row[column])}); set chat_template=FILE.jinja, or leave it out")
    question, answer = read_alpaca(row, where)
    template = ALPACA_PROMPT if len(question) == 1 else ALPACA_PROMPT_WITH_INPUT
    return template.format(**dict(zip(("instruction", "input"), question, strict=False))), answer


def read_alpaca(row: Mapping[str, Any], where: str) -> tuple[list[str], str]:
    """([instruction, input], output), without the input if it is empty."""
    instruction, given = _read_text(row, "instruction", where), _read_text(row, "input", where, default="")
    if not instruction.strip():
        raise DataError(f"{where}: its instruction ({instruction!r}) is empty; leave the row out")
    return [instruction, *([given] if given else [])], _read_text(row, "output", where)


def convert_sharegpt(row: Mapping[str, Any], where: str) -> list[Message]:
    """The conversation of a ShareGPT row: `conversations`, a list of `{"from": ..., "value": ...}`,
    with `system` before it.

    The value of a `function_call` is JSON, `{"name": ..., "arguments": {...}}` or a list of such:
    the assistant's tool calls. An `observation` is a tool's answer. `role` and `content` are
    accepted for `from` and `value`.
    """
    turns = row.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise DataError(f'{where}: its conversations ({_shown(turns)}) must be a list of {{"from": "human", "value": "..."}}')
    messages = [_convert_turn(turn, f"{where}, message {number}") for number, turn in enumerate(turns, 1)]
    messages = list(map(_split_markers, messages)) if row.get("images") else messages
    system = _read_text(row, "system", where, default="")
    if system and messages[0]["role"] == "system":
        raise DataError(f"{where} has a column system and a first message from system; keep one of them")
    return [{"role": "system", "content": system}, *messages] if system else messages


def read_tools(row: Mapping[str, Any], where: str) -> Any:
    """The column `tools` of a ShareGPT row: a list, or a list as JSON text."""
    tools = row.get("tools")
    return _parse(tools, f"{where}: its tools") if isinstance(tools, str) and tools.strip() else tools or None


def _convert_turn(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f'{where} ({_shown(turn)}) must be {{"from": "human", "value": "..."}}')
    sender, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    role = SHAREGPT_ROLES.get(sender) if isinstance(sender, str) else None
    if role is None:
        raise DataError(f"{where}: its from ({sender!r}) must be one of {', '.join(SHAREGPT_ROLES)}")
    if not isinstance(value, str):
        raise DataError(f"{where}: its value ({_shown(value)}) must be text")
    if sender != "function_call":
        return {"role": role, "content": value}
    calls = _parse(value, f"{where}: its value, a function_call,")
    listed = calls if isinstance(calls, list) and calls else [calls]
    return {"role": role, "content": "", "tool_calls": [_make_call(call, where) for call in listed]}


def _make_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
        raise DataError(f'{where}: its function_call ({_shown(call)}) must be {{"name": "...", "arguments": {{...}}}}')
    arguments = call["arguments"]
    arguments = _parse(arguments, f"{where}: the arguments of its function_call") if isinstance(arguments, str) else arguments
    return {"type": "function", "function": {"name": call["name"], "arguments": arguments}}


def _parse(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{what} ({_shown(text)}) is not JSON: {error}") from error


def _read_text(row: Mapping[str, Any], column: str, where: str, default: str | None = None) -> str:
    value = row.get(column)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise DataError(f"{where}: its {column} ({_shown(value)}) must be text; its columns are {', '.join(row)}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_VALUE else text[: SHOWN_VALUE - 3] + "..."
