"""The life cycle of an episode: new, running, over, closed."""

from __future__ import annotations

from ludic.errors import RolloutError


class Episode:
    """Rejects calls out of order: a step before `reset` or after the end, and any call after
    `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = "new"

    @property
    def running(self) -> bool:
        return self._state == "running"

    @property
    def closed(self) -> bool:
        return self._state == "closed"

    def begin(self) -> None:
        self._refuse_closed()
        self._state = "running"

    def check_step(self) -> None:
        self._refuse_closed()
        if self._state == "new":
            raise RolloutError(f"{self._name}: no episode has begun; call reset() before the first step")
        if self._state == "over":
            raise RolloutError(f"{self._name}: the episode is over; call reset() before the next step")

    def check_begun(self) -> None:
        self._refuse_closed()
        if self._state == "new":
            raise RolloutError(f"{self._name}: no episode has begun; call reset() first")

    def end(self) -> None:
        self._state = "over"

    def close(self) -> bool:
        """Returns True on the first call, False after."""
        was_open = self._state != "closed"
        self._state = "closed"
        return was_open

    def _refuse_closed(self) -> None:
        if self._state == "closed":
            raise RolloutError(f"{self._name} is closed; make a new one")
