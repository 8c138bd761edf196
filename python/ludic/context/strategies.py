"""Contexts, which store the messages of an episode and decide which of them the model sees: their
interface, the whole dialogue, and the dialogue without the thinking of earlier responses."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any

from ludic.types import ChatResponse, Info, Message, Observation


class ContextStrategy(ABC):
    """Stores the messages of one episode. A subclass decides which messages are added, and which of
    them the model sees."""

    def __init__(self, system_prompt: str | None = None) -> None:
        self._default_system_prompt = system_prompt
        self._messages: list[Message] = _opening_messages(system_prompt)

    def reset(self, *, system_prompt: str | None = None) -> None:
        """Clear the messages and start with `system_prompt`, or with the default one if it is None.
        An empty system prompt is omitted."""
        self._messages = _opening_messages(self._default_system_prompt if system_prompt is None else system_prompt)

    @property
    def supports_tools(self) -> bool:
        """Whether tool calls and their results can be added."""
        return True

    @property
    def messages(self) -> list[Message]:
        """A copy of the list of all messages."""
        return list(self._messages)

    @property
    def default_system_prompt(self) -> str | None:
        return self._default_system_prompt

    @abstractmethod
    def on_env_reset(self, obs: Observation, info: Info) -> None:
        """Called at the start of the episode with the first observation."""

    @abstractmethod
    def on_before_act(self) -> list[Message]:
        """The messages for the next model call."""

    @abstractmethod
    def on_after_act(self, assistant_response: ChatResponse) -> None:
        """Called with the model's response."""

    @abstractmethod
    def on_after_step(self, next_obs: Observation, info: Info) -> None:
        """Called with the environment's next observation."""

    def add_assistant_step(self, content: str | None, tool_calls: list[dict[str, Any]] | None) -> None:
        """Append a response of the model, possibly with tool calls. Empty parts are omitted."""
        message: Message = {"role": "assistant"}
        if content:
            message["content"] = content
        if tool_calls:
            message["tool_calls"] = tool_calls
        self._messages.append(message)

    def add_tool_result(self, tool_call_id: str, tool_name: str, result: str) -> None:
        """Append the result of a tool."""
        self._messages.append({"role": "tool", "tool_call_id": tool_call_id, "name": tool_name, "content": result})


def _opening_messages(system_prompt: str | None) -> list[Message]:
    return [{"role": "system", "content": system_prompt}] if system_prompt else []


class FullDialog(ContextStrategy):
    """Observations are user messages, responses are assistant messages, and the model sees all of
    them.

    An environment can start the dialogue with several messages: a list `messages` in the info of
    its reset replaces the first observation (`PromptEnv` does this for conversations). A system
    message in it replaces the context's own.
    """

    def on_env_reset(self, obs: Observation, info: Info) -> None:
        given = info.get("messages")
        opening: list[Message] = []
        if isinstance(given, list) and all(isinstance(message, dict) and "role" in message for message in given):
            opening = [dict(message) for message in given]
        if any(message["role"] in ("system", "developer") for message in opening):
            self._messages = []
        self._messages.extend(opening or [{"role": "user", "content": obs}])

    def on_before_act(self) -> list[Message]:
        return list(self._messages)

    def on_after_act(self, assistant_response: ChatResponse) -> None:
        self._messages.append({"role": "assistant", "content": assistant_response.text})

    def on_after_step(self, next_obs: Observation, info: Info) -> None:
        self._messages.append({"role": "user", "content": next_obs})


class GivenDialog(FullDialog):
    """The same as `FullDialog`. The name says that the environment starts the dialogue with several
    messages."""


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
