"""The whole dialogue, from the first message to the last."""

from __future__ import annotations

from ludic.context.base import ContextStrategy
from ludic.types import ChatResponse, Info, Message


class FullDialog(ContextStrategy):
    """Observations are user messages, answers are assistant messages, and the model sees all of
    them.

    An environment may give more than one message to begin with: a list of them as `messages` in the
    info of its reset stands for the first observation (`PromptEnv` does so for a prompt that is a
    conversation). A system message among them replaces the context's own.
    """

    def on_env_reset(self, obs: str, info: Info) -> None:
        given = _messages(info)
        if any(message["role"] in ("system", "developer") for message in given):
            self._messages = []
        self._messages.extend(given or [{"role": "user", "content": obs}])

    def on_before_act(self) -> list[Message]:
        return list(self._messages)

    def on_after_act(self, assistant_response: ChatResponse) -> None:
        self._messages.append({"role": "assistant", "content": assistant_response.text})

    def on_after_step(self, next_obs: str, info: Info) -> None:
        self._messages.append({"role": "user", "content": next_obs})


def _messages(info: Info) -> list[Message]:
    """Copies of those that the environment gave; none where `messages` is something else of the
    environment's."""
    given = info.get("messages")
    if not isinstance(given, list) or not all(isinstance(message, dict) and "role" in message for message in given):
        return []
    return [dict(message) for message in given]
