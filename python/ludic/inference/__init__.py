"""Clients of language models: the interfaces, an engine in this process, servers with OpenAI's interface.

Importing it loads no model library.
"""

from typing import TYPE_CHECKING, Any

from ludic.inference.client import ChatClient, VersionedClient
from ludic.inference.extensions import BackendExtensions, VLLMExtensions
from ludic.inference.request import ChatCompletionRequest, InferenceSpec, ReturnSpec, ToolRequest
from ludic.inference.reward_types import PoolingType, RewardModelTrainingMode, ScoringRequest, ScoringResponse
from ludic.inference.sampling import SamplingConfig, SamplingParams

if TYPE_CHECKING:
    from ludic.inference.local import LocalChatClient
    from ludic.inference.local_reward import LocalRewardModel
    from ludic.inference.openai_client import OpenAIChatClient

__all__ = [
    "BackendExtensions",
    "ChatClient",
    "ChatCompletionRequest",
    "InferenceSpec",
    "LocalChatClient",
    "LocalRewardModel",
    "OpenAIChatClient",
    "PoolingType",
    "ReturnSpec",
    "RewardModelTrainingMode",
    "SamplingConfig",
    "SamplingParams",
    "ScoringRequest",
    "ScoringResponse",
    "ToolRequest",
    "VLLMExtensions",
    "VersionedClient",
]


def __getattr__(name: str) -> Any:
    if name == "LocalChatClient":
        from ludic.inference.local import LocalChatClient

        return LocalChatClient
    if name == "LocalRewardModel":
        from ludic.inference.local_reward import LocalRewardModel

        return LocalRewardModel
    if name == "OpenAIChatClient":
        from ludic.inference.openai_client import OpenAIChatClient

        return OpenAIChatClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
