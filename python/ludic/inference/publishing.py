"""The contract between publishers, which replace the weights of a model, and the clients that
sample from it."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

Version = str | int | None
"""The name of a set of weights, usually the trainer's step."""


@runtime_checkable
class PolicyPublisher(Protocol):
    """Makes new weights the ones that are sampled from. `publish` may be a coroutine function."""

    def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> Awaitable[None] | None: ...


@runtime_checkable
class LearningPublisher(PolicyPublisher, Protocol):
    """A publisher that is told whether there was anything to learn."""

    def expect_change(self, expected: bool) -> None: ...


class Publisher:
    """Base class of the publishers here: `publish`, and defaults for the other members that are
    read of a publisher. `as_publisher` makes one of any object with `publish`."""

    def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> Awaitable[None] | None:
        """Make these weights the ones that are sampled from, under this version."""
        raise NotImplementedError(f"{type(self).__name__} does not publish")

    def expect_change(self, expected: bool) -> None:
        """Say whether there was a gradient since the last push. Called before each `publish`; a
        publisher that is not told assumes that there was."""

    def close(self) -> None:
        """Close the connections to the servers, which keep their weights."""

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds of the last push, by phase. Empty where they are not measured."""
        return {}


class _UserPublisher(Publisher):
    """A user's object with `publish`, and with `expect_change` or not."""

    def __init__(self, publisher: PolicyPublisher) -> None:
        self._publisher = publisher

    def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> Awaitable[None] | None:
        return self._publisher.publish(state_dict, version=version)

    def expect_change(self, expected: bool) -> None:
        if isinstance(self._publisher, LearningPublisher):
            self._publisher.expect_change(expected)


def as_publisher(publisher: PolicyPublisher) -> Publisher:
    """The publisher itself if it derives from `Publisher`, else a wrapper with the defaults."""
    return publisher if isinstance(publisher, Publisher) else _UserPublisher(publisher)


class Connections(Protocol):
    """What a publisher holds open to servers."""

    def close(self) -> None: ...


class PushTarget:
    """Servers of one model, as publishers see them. A client of such servers derives from it.

    >>> client.all_urls()
    ['http://127.0.0.1:8000']
    """

    server_url: str = ""
    """The address of the first server."""
    server_urls: Sequence[str] = ()
    """The address of each server. May be empty if there is one."""
    connections: Connections | None = None
    """Of the last publisher that was made for these servers."""

    def all_urls(self) -> list[str]:
        """The address of each server."""
        return [str(url) for url in self.server_urls or [self.server_url] if url]

    @property
    def request_headers(self) -> Mapping[str, str]:
        """Sent with every request to these servers, such as the API key."""
        return {}

    def hold_connections(self, connections: Connections) -> None:
        """Remember the connections that a publisher made for these servers."""
        self.connections = connections

    def weights_changed(self, version: Version, *, lost: Sequence[str] = ()) -> None:
        """Called after a push: `version` is served now, and the servers at the URLs `lost` must
        get no more requests."""

    def adapter_changed(self, name: str, served_name: str) -> None:
        """Called after a push of adapters: requests for the model `name` go to `served_name`."""
