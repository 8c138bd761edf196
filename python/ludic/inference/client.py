"""What an inference client offers to agents and publishers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ludic.inference.request import ChatCompletionRequest
from ludic.types import ChatResponse

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ChatClient", "ChatResponse", "VersionedClient"]


class ChatClient(Protocol):
    """A model behind a chat interface. Clients may derive from it, or just have its methods."""

    async def complete(self, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        """One completion, and what else the server said."""
        raise NotImplementedError(f"{type(self).__name__} does not complete requests")

    def sync_weights(self, params: Mapping[str, Tensor], *, timeout_s: float = 600.0, version: str | int | None = None) -> str:
        """Replace weights by name; returns the version that is now served."""
        raise NotImplementedError(f"{type(self).__name__} does not take new weights")


class VersionedClient(ChatClient, Protocol):
    """A client that knows which weights it serves."""

    async def get_policy_version(self) -> int:
        """The version last committed by `sync_weights`."""
        raise NotImplementedError(f"{type(self).__name__} does not know its version")
