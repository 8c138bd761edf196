"""The interfaces of inference clients, for agents and publishers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ludic.inference.request import ChatCompletionRequest
from ludic.types import ChatResponse

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ChatClient", "ChatResponse", "VersionedClient"]


class ChatClient(Protocol):
    """A model behind a chat interface. Clients may subclass it or just have its methods."""

    async def complete(self, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        """One completion, and an info with what else the server returned."""
        raise NotImplementedError(f"{type(self).__name__} does not complete requests")

    def sync_weights(self, params: Mapping[str, Tensor], *, timeout_s: float = 600.0, version: str | int | None = None) -> str:
        """Replace weights by name; returns the version now served."""
        raise NotImplementedError(f"{type(self).__name__} does not take new weights")


class VersionedClient(ChatClient, Protocol):
    """A client that knows the version of its weights."""

    async def get_policy_version(self) -> int:
        """The version last committed by `sync_weights`."""
        raise NotImplementedError(f"{type(self).__name__} does not know its version")
