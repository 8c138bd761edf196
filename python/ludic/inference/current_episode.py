"""Which episode a request belongs to, so that an engine may keep what it has read for the
episode's next turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Episode:
    """The identity of one episode. What is kept for it goes when it ends: others may hold on to
    the object, as timers do that copied the context."""

    def __init__(self) -> None:
        self.is_over = False
        self._endings: set[Callable[[Episode], None]] = set()

    def at_end(self, forget: Callable[[Episode], None]) -> None:
        """Call `forget` with this episode when it ends; at once if it has. Other threads may
        ask."""
        self._endings.add(forget)
        if self.is_over:
            self.end()

    def end(self) -> None:
        """The last turn was played, or the episode was given up."""
        self.is_over = True
        while self._endings:
            self._endings.pop()(self)


_CURRENT: ContextVar[Episode | None] = ContextVar("ludic_episode", default=None)


@contextmanager
def new_episode() -> Iterator[Episode]:
    """Requests made inside, and in tasks that are started inside, belong to one episode, which
    ends with the block."""
    episode = Episode()
    token = _CURRENT.set(episode)
    try:
        yield episode
    finally:
        episode.end()
        _CURRENT.reset(token)  # fails in another context, such as that which closes a coroutine nobody waits for


def current_episode() -> Episode | None:
    """The episode that the running task plays, if it plays one."""
    return _CURRENT.get()
