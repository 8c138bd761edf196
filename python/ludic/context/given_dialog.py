"""A dialogue that begins with messages of the environment's."""

from __future__ import annotations

from ludic.context.full_dialog import FullDialog
from ludic.types import Info


class GivenDialog(FullDialog):
    """A full dialogue, which begins with the messages in `info["messages"]` of the environment's reset, if there are any, instead of the
    first observation. A system message among them replaces the context's own."""

    def on_env_reset(self, obs: str, info: Info) -> None:
        given = info.get("messages")
        if not given:
            super().on_env_reset(obs, info)
            return
        if any(message["role"] in ("system", "developer") for message in given):
            self._messages = []
        self._messages.extend(dict(message) for message in given)
