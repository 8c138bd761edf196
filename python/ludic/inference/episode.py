"""Which episode a request belongs to, so that an engine may keep what it has read for the episode's next turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Episode:
    """The identity of one episode. What is kept for it goes when it does."""


_CURRENT: ContextVar[Episode | None] = ContextVar("ludic_episode", default=None)


@contextmanager
def new_episode() -> Iterator[Episode]:
    """Requests made inside, and in tasks that are started inside, belong to one episode."""
    episode = Episode()
    token = _CURRENT.set(episode)
    try:
        yield episode
    finally:
        _CURRENT.reset(token)


def current_episode() -> Episode | None:
    """The episode that the running task plays, if it plays one."""
    return _CURRENT.get()
