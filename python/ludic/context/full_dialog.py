"""The whole dialogue, from the first message to the last."""

from __future__ import annotations

from ludic.context.base import ContextStrategy
from ludic.types import ChatResponse, Info, Message


class FullDialog(ContextStrategy):
    """Observations are user messages, answers are assistant messages, and the model sees all of them."""

    def on_env_reset(self, obs: str, info: Info) -> None:
        self._messages.append({"role": "user", "content": obs})

    def on_before_act(self) -> list[Message]:
        return list(self._messages)

    def on_after_act(self, assistant_response: ChatResponse) -> None:
        self._messages.append({"role": "assistant", "content": assistant_response.text})

    def on_after_step(self, next_obs: str, info: Info) -> None:
        self._messages.append({"role": "user", "content": next_obs})
