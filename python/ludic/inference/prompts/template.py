"""Messages and tools as the text that a model reads, by the chat template of its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ludic.errors import ConfigError
from ludic.inference.request import ToolRequest
from ludic.types import Message


def offered_tools(request: ToolRequest | None) -> list[dict[str, Any]]:
    """The tools that the model is shown: none where the request has none or wants none called.

    Raises ConfigError for a `tool_choice` that would have to force a call, which sampling cannot.
    """
    if request is None or request.tool_choice == "none":
        return []
    if request.tool_choice not in ("auto", None):
        raise ConfigError(
            f"tool_choice ({request.tool_choice!r}) cannot be forced here; use 'auto', or 'none' to offer no tools, or a server that "
            "decodes under constraints"
        )
    return list(request.tools)


class ChatTemplate:
    """Renders prompts with the tokenizer's chat template.

    Without one, a prompt of one message is its text; a system message goes before it, with a blank
    line between. A conversation is an error: nothing would say who speaks, nor where one message
    ends.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._shown: set[tuple[str, str]] = set()
        """(template, tools) of which it is known that the text shows the tools."""

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt, ready for the model's answer. Raises ConfigError where the tools, or who
        speaks, would not be seen."""
        template = self._source
        if not template:
            if tools:
                raise ConfigError(
                    "the tokenizer has no chat template, so the model cannot be shown tools; set tokenizer.chat_template to one that "
                    "renders them, or use an agent without tools"
                )
            return _contents(messages)
        plain = [_as_templates_expect(message) for message in messages]
        text = self._apply(plain, list(tools))
        if tools:
            self._check_shown(plain, text, (str(template), json.dumps(tools)))
        return text

    def render_all(self, dialogues: Sequence[Sequence[Message]]) -> list[str]:
        """`render` of each, without tools; one call of the tokenizer, which takes half the time
        of many."""
        if not self._source or not dialogues:
            return [_contents(messages) for messages in dialogues]
        plain = [[_as_templates_expect(message) for message in messages] for messages in dialogues]
        texts: list[str] = self._tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
        return texts

    @property
    def _source(self) -> str | None:
        """The template itself."""
        return getattr(self._tokenizer, "chat_template", None)

    def _check_shown(self, messages: list[Message], text: str, key: tuple[str, str]) -> None:
        """Once for each set of tools: a template that leaves them out gives the same text
        without them."""
        if key in self._shown:
            return
        if text == self._apply(messages, []):
            raise ConfigError(
                "the tokenizer's chat template leaves tools out, so the model would not see them; set tokenizer.chat_template to one "
                "that renders `tools`, or use an agent without tools"
            )
        self._shown.add(key)

    def _apply(self, messages: list[Message], tools: list[Mapping[str, Any]]) -> str:
        extra = {"tools": tools} if tools else {}
        text: str = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **extra)
        return text


def _contents(messages: Sequence[Message]) -> str:
    """The text of a message that stands alone, or that only a system message precedes: that one,
    a blank line, the text."""
    contents = [message.get("content") or "" for message in messages]
    roles = [str(message.get("role")) for message in messages]
    if len(messages) < 2 or (len(messages) == 2 and roles[0] in ("system", "developer")):
        return "\n\n".join(content for content in contents if content)
    raise ConfigError(
        f"the prompt is a conversation of {len(messages)} messages ({', '.join(roles)}), and the tokenizer has no chat template, which "
        "says how they are written; set tokenizer.chat_template, or give prompts of one message"
    )


def _as_templates_expect(message: Message) -> Message:
    """Templates read `content` without asking whether it is there, and want the arguments of a
    call as an object, not as its text."""
    if message.get("content") is not None and not message.get("tool_calls"):
        return message
    expected = {**message, "content": message.get("content") or ""}
    if message.get("tool_calls"):
        expected["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return expected


def _with_object(call: Any) -> Any:
    try:
        function = call["function"]
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
