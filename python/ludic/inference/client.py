"""The interfaces of inference clients, for agents and publishers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ludic.inference.request import ChatCompletionRequest
from ludic.inference.sampling import SamplingParams
from ludic.types import ChatResponse, TokenTrace

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ChatClient", "ChatResponse", "ClipsPrompts", "CompletesTokens", "VersionedClient"]


class ChatClient(Protocol):
    """A model with a chat interface. Clients may subclass it or just have its methods."""

    async def complete(self, request: ChatCompletionRequest) -> tuple[ChatResponse, dict[str, Any]]:
        """One completion, and an info with everything else that the server returned."""
        raise NotImplementedError(f"{type(self).__name__} does not complete requests")

    def sync_weights(self, params: Mapping[str, Tensor], *, timeout_s: float = 600.0, version: str | int | None = None) -> str:
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


@runtime_checkable
class ClipsPrompts(Protocol):
    """A client that may cut long prompts before it sends them."""

    @property
    def prompts_clipped(self) -> int:
        """Prompts cut so far."""
        ...
