"""The episode that a request belongs to, which lets an engine cache the prefix for the episode's
next turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Episode:
    """The identity of one episode. Caches drop its data when it ends, not when the object is freed:
    timers that copied the context may keep the object alive longer."""

    def __init__(self) -> None:
        self.is_over = False
        self._callbacks: set[Callable[[Episode], None]] = set()

    def on_end(self, callback: Callable[[Episode], None]) -> None:
        """Call `callback` with this episode when it ends, or at once if it has ended already.
        Thread-safe."""
        self._callbacks.add(callback)
        if self.is_over:
            self.end()

    def end(self) -> None:
        """End the episode, after its last turn or when it is abandoned."""
        self.is_over = True
        while self._callbacks:
            self._callbacks.pop()(self)


_CURRENT: ContextVar[Episode | None] = ContextVar("ludic_episode", default=None)


@contextmanager
def new_episode() -> Iterator[Episode]:
    """All requests in the block, also those of tasks started inside, belong to one episode. The
    episode ends with the block."""
    episode = Episode()
    token = _CURRENT.set(episode)
    try:
        yield episode
    finally:
        episode.end()
        _CURRENT.reset(token)  # fails in another context, as when an unawaited coroutine is closed


def current_episode() -> Episode | None:
    """The episode of the running task, or None."""
    return _CURRENT.get()
