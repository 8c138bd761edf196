"""The whole dialogue, from the first message to the last."""

from __future__ import annotations

from ludic.context.base import ContextStrategy
from ludic.types import ChatResponse, Info, Message


class FullDialog(ContextStrategy):
    """Observations are user messages, responses are assistant messages, and the model sees all of
    them.

    An environment can start the dialogue with several messages: a list `messages` in the info of
    its reset replaces the first observation (`PromptEnv` does this for conversations). A system
    message in it replaces the context's own.
    """

    def on_env_reset(self, obs: str, info: Info) -> None:
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

    def on_after_step(self, next_obs: str, info: Info) -> None:
        self._messages.append({"role": "user", "content": next_obs})


class GivenDialog(FullDialog):
    """The same as `FullDialog`. The name says that the environment starts the dialogue with several
    messages."""
