"""The interfaces of inference clients, for agents and publishers, and the episode that a request
belongs to: with it an engine caches the prefix for the episode's next turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

from ludic.inference.publishing import Weights
from ludic.inference.request import ChatCompletionRequest
from ludic.inference.sampling import SamplingParams
from ludic.types import ChatResponse, TokenTrace

__all__ = ["ChatClient", "ChatResponse", "CompletesTokens", "VersionedClient"]


class ChatClient(Protocol):
    """A model with a chat interface. Clients may subclass it or just have its methods."""

    async def complete(self, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        """One completion, and an info with everything else that the server returned."""
        raise NotImplementedError(f"{type(self).__name__} does not complete requests")

    def sync_weights(self, params: Weights, *, timeout_s: float = 600.0, version: str | int | None = None) -> str:
        """Replace weights by name; returns the version now served."""
        raise NotImplementedError(f"{type(self).__name__} does not take new weights")


class VersionedClient(ChatClient, Protocol):
    """A client that knows the version of its weights."""

    async def get_policy_version(self) -> int:
        """The version last committed by `sync_weights`."""
        raise NotImplementedError(f"{type(self).__name__} does not know its version")


@runtime_checkable
class CompletesTokens(Protocol):
    """A client that can continue token ids, without a chat template."""

    async def complete_tokens(
        self, prompt_token_ids: Sequence[int], *, sampling: SamplingParams | None = None, seed: int | None = None
    ) -> TokenTrace:
        """Sample a completion of these ids."""
        ...


class Episode:
    """The identity of one episode. Caches drop its data when it ends, not when the object is freed:
    timers that copied the context may keep the object alive longer."""

    def __init__(self) -> None:
        self.is_over = False
        self._callbacks: set[Callable[[Episode], None]] = set()

    def on_end(self, callback: Callable[[Episode], None]) -> None:
        """Call `callback` with this episode when it ends, or immediately if it has ended already.
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
    """All requests in the block, also in tasks started inside, belong to one episode. The
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
