"""Renders messages and tools to prompt text with the tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ludic.errors import ConfigError
from ludic.inference.prompts.tool_calls import CLOSING, OPENING, parse_tool_calls
from ludic.inference.request import ToolRequest
from ludic.types import Message


def select_tools(request: ToolRequest | None) -> list[dict[str, Any]]:
    """The tools to render into the prompt. Empty if the request has none or its `tool_choice` is
    "none".

    Raises ConfigError for a `tool_choice` that forces a call, which plain sampling cannot do.
    """
    if request is None or request.tool_choice == "none":
        return []
    if request.tool_choice not in ("auto", None):
        raise ConfigError(
            f"tool_choice ({request.tool_choice!r}) cannot be forced here; use 'auto', 'none' to offer no tools, or a server with "
            "constrained decoding"
        )
    return list(request.tools)


class ChatTemplate:
    """Renders prompts with the tokenizer's chat template.

    Without a template, the prompt of a single message is its text, after the system message and a
    blank line if there is one. A longer conversation is an error: nothing would separate the
    messages or name the speakers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._checked: set[tuple[str, str]] = set()
        """(template, tools) pairs that were checked to render the tools."""

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt, up to the beginning of the model's answer. Raises ConfigError if it would not
        contain the tools or name the speakers."""
        template = self._template_source
        if not template:
            if tools:
                raise ConfigError(
                    "the tokenizer has no chat template, so the model cannot be shown tools; set tokenizer.chat_template to one that "
                    "renders them, or use an agent without tools"
                )
            return _join_contents(messages)
        plain = [_normalize(message) for message in messages]
        text = self._apply(plain, list(tools))
        if tools:
            self._check_tools_rendered(plain, text, (str(template), json.dumps(tools)))
        return text

    def render_all(self, dialogues: Sequence[Sequence[Message]]) -> list[str]:
        """`render` each dialogue without tools. One call of the tokenizer takes half the time of
        many."""
        if not self._template_source or not dialogues:
            return [_join_contents(messages) for messages in dialogues]
        plain = [[_normalize(message) for message in messages] for messages in dialogues]
        texts: list[str] = self._tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
        return texts

    def check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError unless a prompt shows the tools, a call and its result, and writes the
        call in the form in which calls are read."""
        dialogue, argument, result = _example_call(str(tools[0]["function"]["name"]))
        try:
            text = self.render(dialogue, tools)
        except ConfigError:
            raise
        except Exception as error:  # of the template, which may raise anything
            raise ConfigError(f"the chat template cannot write a call of a tool and its result: {error}") from error
        place = text.find(argument)
        if place < 0:
            raise ConfigError("the chat template leaves the calls of tools out (`tool_calls` of a message)")
        if result not in text:
            raise ConfigError("the chat template leaves the results of tools out (messages of the role `tool`)")
        end = text.find(CLOSING, place)
        call = text[max(0, text.rfind(OPENING, 0, place)) : end + len(CLOSING) if end >= 0 else len(text)]
        if not parse_tool_calls(call):
            raise ConfigError(
                f"the chat template writes a call as {call[:120]!r}, and calls are read as "
                f'{OPENING}{{"name": ..., "arguments": {{...}}}}{CLOSING}, so that none would be found'
            )

    @property
    def _template_source(self) -> str | None:
        """The Jinja source of the template."""
        return getattr(self._tokenizer, "chat_template", None)

    def _check_tools_rendered(self, messages: list[Message], text: str, key: tuple[str, str]) -> None:
        """Raise ConfigError if the text is the same without the tools. Checks each set of tools
        once."""
        if key in self._checked:
            return
        if text == self._apply(messages, []):
            raise ConfigError(
                "the tokenizer's chat template ignores tools, so the model would not see them; set tokenizer.chat_template to one "
                "that renders `tools`, or use an agent without tools"
            )
        self._checked.add(key)

    def _apply(self, messages: list[Message], tools: list[Mapping[str, Any]]) -> str:
        extra = {"tools": tools} if tools else {}
        text: str = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **extra)
        return text


def _example_call(name: str) -> tuple[list[Message], str, str]:
    """(a dialogue with a call of the tool, the text of its argument, its result)."""
    argument, result = "an-argument-4711", "a-result-8192"
    function = {"name": name, "arguments": json.dumps({"example": argument})}
    call = {"id": "call00000", "type": "function", "function": function}
    messages: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "name": name, "content": result},
    ]
    return messages, argument, result


def _join_contents(messages: Sequence[Message]) -> str:
    """The text of a single message, after the system message and a blank line if there is one."""
    contents = [message.get("content") or "" for message in messages]
    roles = [str(message.get("role")) for message in messages]
    if len(messages) < 2 or (len(messages) == 2 and roles[0] in ("system", "developer")):
        return "\n\n".join(content for content in contents if content)
    raise ConfigError(
        f"the prompt is a conversation of {len(messages)} messages ({', '.join(roles)}), and the tokenizer has no chat template to "
        "render them; set tokenizer.chat_template, or use prompts of one message"
    )


def _normalize(message: Message) -> Message:
    """The form that chat templates expect: `content` is present, and the arguments of tool calls
    are objects rather than JSON text."""
    if message.get("content") is not None and not message.get("tool_calls"):
        return message
    normalized = {**message, "content": message.get("content") or ""}
    if message.get("tool_calls"):
        normalized["tool_calls"] = [_with_arguments_object(call) for call in message["tool_calls"]]
    return normalized


def _with_arguments_object(call: Any) -> Any:
    try:
        function = call["function"]
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
