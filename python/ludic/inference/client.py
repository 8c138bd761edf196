"""The interfaces of inference clients, for agents and publishers; of publishers, which replace the
weights of the model that a client samples from; and the episode that a request belongs to: with it
an engine caches the prefix for the episode's next turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ludic.inference.request import ChatCompletionRequest, SamplingParams
from ludic.types import ChatResponse, TokenTrace
from ludic.user_objects import forward_members

if TYPE_CHECKING:
    from torch import Tensor

Version = str | int | None
"""The name of a set of weights, usually the trainer's step."""
Weights = Mapping[str, "Tensor"]
"""Name -> weight."""


@runtime_checkable
class PolicyPublisher(Protocol):
    """Makes new weights the ones that are sampled from. `publish` may be a coroutine function."""

    def publish(self, state_dict: Weights, version: Version = None) -> Awaitable[None] | None: ...


class WeightSource(Protocol):
    """Weights that are gathered from several processes while they are read, so that one process
    never has all of them. Each iteration gathers them again, in the same order."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), a part of them in memory at a time."""
        ...

    def describe(self) -> Weights:
        """Name -> a tensor on the device `meta` with the shape and the dtype to come."""
        ...


class Publisher:
    """Base class of publishers: `publish`, and defaults for the other members that the trainer
    uses. `as_publisher` wraps any object with `publish`."""

    needs_weights: bool = True
    """Whether `publish` reads the weights. A publisher that has the backend write a folder does
    not: all ranks call its `publish`, with an empty mapping."""
    takes_adapters: bool = False
    """Whether the weights are the adapters alone, by their names in PEFT's file."""

    shares_device: bool = False
    """Whether the servers compute on the trainer's device, which they free in `sleep`."""

    def sleep(self) -> Awaitable[None] | None:
        """Have the servers free their device until the next `publish`, which wakes them. Called
        before the trainer computes, if `shares_device`."""

    def publish(self, state_dict: Weights, version: Version = None) -> Awaitable[None] | None:
        """Make these weights the ones that are sampled from, under this version."""
        raise NotImplementedError(f"{type(self).__name__} does not publish")

    def publish_stream(self, weights: WeightSource, version: Version = None) -> Awaitable[None] | None:
        """`publish` for weights that are sharded over ranks. By default they are collected first,
        so that this process holds the whole model."""
        return self.publish(dict(weights), version=version)

    def expect_change(self, expected: bool) -> None:
        """Set whether there was a gradient since the last push. Called before each `publish`; the
        default is that there was."""

    def close(self) -> None:
        """Close the connections to the servers, which keep their weights."""

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds of the last push, by phase. Empty if they are not measured."""
        return {}


@forward_members("_publisher", ["needs_weights", "expect_change", "shares_device", "sleep"])
class _UserPublisher(Publisher):
    """Wraps a user's object with `publish`, which may also have `expect_change`, `needs_weights`,
    `shares_device` and `sleep`."""

    def __init__(self, publisher: PolicyPublisher) -> None:
        self._publisher = publisher

    def publish(self, state_dict: Weights, version: Version = None) -> Awaitable[None] | None:
        return self._publisher.publish(state_dict, version=version)


def as_publisher(publisher: PolicyPublisher) -> Publisher:
    """The publisher itself if it derives from `Publisher`, else a wrapper with the defaults."""
    return publisher if isinstance(publisher, Publisher) else _UserPublisher(publisher)


class PushTarget:
    """The servers of one model, as publishers see them. Clients that can push derive from it.

    >>> client.all_urls()
    ['http://127.0.0.1:8000']
    """

    server_url: str = ""
    """The address of the first server."""
    server_urls: Sequence[str] = ()
    """The address of each server. May be empty if there is only `server_url`."""
    connections: Any = None
    """The connections of the last publisher that was made for these servers; they have `close`."""

    def all_urls(self) -> list[str]:
        """The address of each server."""
        return [str(url) for url in self.server_urls or [self.server_url] if url]

    @property
    def request_headers(self) -> Mapping[str, str]:
        """Headers of every request to these servers, such as the API key."""
        return {}

    def hold_connections(self, connections: Any) -> None:
        """Remember the connections that a publisher made for these servers."""
        self.connections = connections

    def weights_changed(self, version: Version, *, lost: Sequence[str] = ()) -> None:
        """Called after a push: `version` is served now, and the servers at the URLs `lost` must not
        get requests any more."""

    def adapter_changed(self, name: str, served_name: str) -> None:
        """Called after a push of adapters: requests for the model `name` go to `served_name`."""


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


@dataclass(frozen=True)
class Sampled:
    """What an engine sampled."""

    trace: TokenTrace
    ended: bool
    """Whether the last sampled id ends a turn."""
    policy_version: int
    """The oldest version of the weights that sampled one of the tokens."""
    weight_versions: Sequence[Mapping[str, Any]] = ()
    """The version of each span of tokens, if the engine reports it."""


@runtime_checkable
class CompletesTokens(Protocol):
    """A client that can continue token ids, without a chat template."""

    async def complete_tokens(
        self, prompt_token_ids: Sequence[int], *, sampling: SamplingParams | None = None, seed: int | None = None
    ) -> TokenTrace:
        """Sample a completion of these ids."""
        ...


@runtime_checkable
class SamplesTokens(Protocol):
    """A client that can continue token ids, and tells which weights sampled the completion. Asking
    for the version afterwards would be too late: it may have changed. Of a model that sees images
    the client has their processor as `images`."""

    async def sample_tokens(
        self, prompt_token_ids: Sequence[int], *, sampling: SamplingParams | None = None, seed: int | None = None, **images: Any
    ) -> Sampled:
        """Sample one completion. The returned trace has exactly these prompt ids. A prompt with
        images has their spans as the keyword `images`."""
        ...


class CompletesBySampling:
    """`complete_tokens` of clients that sample tokens."""

    sample_tokens: Callable[..., Awaitable[Sampled]]

    async def complete_tokens(self, prompt_token_ids: Sequence[int], **keywords: Any) -> TokenTrace:
        """The trace of `sample_tokens`, which takes the same keywords."""
        return (await self.sample_tokens(prompt_token_ids, **keywords)).trace


class Episode:
    """The identity of one episode. Caches drop its data when it ends, not when the object is freed:
    timers that copied the context may keep the object alive longer."""

    def __init__(self) -> None:
        self.is_over = False
        self._callbacks: set[Callable[[Episode], object]] = set()

    def on_end(self, callback: Callable[[Episode], object]) -> None:
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
    try:
        with as_episode(episode):
            yield episode
    finally:
        episode.end()


@contextmanager
def as_episode(episode: Episode) -> Iterator[None]:
    """All requests in the block belong to an episode that runs elsewhere, which does not end with
    the block."""
    token = _CURRENT.set(episode)
    try:
        yield
    finally:
        _CURRENT.reset(token)  # fails in another context, as when an unawaited coroutine is closed


def current_episode() -> Episode | None:
    """The episode of the running task, or None."""
    return _CURRENT.get()
