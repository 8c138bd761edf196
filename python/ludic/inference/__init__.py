"""Clients of language models: the interfaces, and an engine in this process. Importing it loads no model library."""

from typing import TYPE_CHECKING, Any

from ludic.inference.client import ChatClient, VersionedClient
from ludic.inference.extensions import BackendExtensions, VLLMExtensions
from ludic.inference.request import ChatCompletionRequest, InferenceSpec, ReturnSpec, ToolRequest
from ludic.inference.sampling import SamplingConfig, SamplingParams

if TYPE_CHECKING:
    from ludic.inference.local import LocalChatClient

__all__ = [
    "BackendExtensions",
    "ChatClient",
    "ChatCompletionRequest",
    "InferenceSpec",
    "LocalChatClient",
    "ReturnSpec",
    "SamplingConfig",
    "SamplingParams",
    "ToolRequest",
    "VLLMExtensions",
    "VersionedClient",
]


def __getattr__(name: str) -> Any:
    if name == "LocalChatClient":
        from ludic.inference.local import LocalChatClient

        return LocalChatClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
