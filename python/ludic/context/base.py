"""What the model is shown: the messages of an episode, and who adds to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ludic.types import ChatResponse, Info, Message


class ContextStrategy(ABC):
    """Holds the messages of one episode. A subclass says what is added when, and what the model
    sees."""

    def __init__(self, system_prompt: str | None = None) -> None:
        self._default_system_prompt = system_prompt
        self._messages: list[Message] = _opening(system_prompt)

    def reset(self, *, system_prompt: str | None = None) -> None:
        """Forget all messages; begin with the system prompt given, else the default one, if it
        is not empty."""
        self._messages = _opening(self._default_system_prompt if system_prompt is None else system_prompt)

    @property
    def supports_tools(self) -> bool:
        """Whether calls of tools and their results can be added."""
        return True

    @property
    def messages(self) -> list[Message]:
        """A copy of the list of all messages."""
        return list(self._messages)

    @property
    def default_system_prompt(self) -> str | None:
        return self._default_system_prompt

    @abstractmethod
    def on_env_reset(self, obs: str, info: Info) -> None:
        """The episode begins."""

    @abstractmethod
    def on_before_act(self) -> list[Message]:
        """The messages that the model is shown."""

    @abstractmethod
    def on_after_act(self, assistant_response: ChatResponse) -> None:
        """The model has answered."""

    @abstractmethod
    def on_after_step(self, next_obs: str, info: Info) -> None:
        """The environment has answered."""

    def add_assistant_step(self, content: str | None, tool_calls: list[dict[str, Any]] | None) -> None:
        """Append an answer of the model that may call tools. Empty parts are left out."""
        message: Message = {"role": "assistant"}
        if content:
            message["content"] = content
        if tool_calls:
            message["tool_calls"] = tool_calls
        self._messages.append(message)

    def add_tool_result(self, tool_call_id: str, tool_name: str, result: str) -> None:
        """Append what a tool returned."""
        self._messages.append({"role": "tool", "tool_call_id": tool_call_id, "name": tool_name, "content": result})


def _opening(system_prompt: str | None) -> list[Message]:
    return [{"role": "system", "content": system_prompt}] if system_prompt else []
