"""The whole dialogue, without the thinking of earlier responses."""

from __future__ import annotations

import re

from ludic.context.full_dialog import FullDialog
from ludic.types import Message


class TruncatedThinkingContext(FullDialog):
    """Replaces the text inside a leading `<think>...</think>` of the model's earlier responses by
    `placeholder`.

    Only what the model sees changes: the stored messages stay complete. Messages are changed only
    if they start with `<think>`, close the tag, and continue with an answer.
    """

    def __init__(self, system_prompt: str | None = None, placeholder: str = "[TRUNCATED]") -> None:
        super().__init__(system_prompt)
        self.placeholder = placeholder
        self.strict_pattern = re.compile(r"(\s*<think>)(.*?)(</think>\s*)(\S.*)", re.IGNORECASE | re.DOTALL)

    def on_before_act(self) -> list[Message]:
        return [self._truncate_thinking(message) for message in self._messages]

    def _truncate_thinking(self, message: Message) -> Message:
        content = message.get("content")
        if message.get("role") != "assistant" or not isinstance(content, str):
            return message
        match = self.strict_pattern.fullmatch(content)
        if match is None:
            return message
        opening, _, closing, answer = match.groups()
        return {**message, "content": f"{opening}{self.placeholder}{closing}{answer}"}
