"""Clients of language models: the interfaces, an engine in this process, servers with OpenAI's interface.

Importing it loads no model library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ludic.inference.client import ChatClient, VersionedClient
from ludic.inference.extensions import BackendExtensions, VLLMExtensions
from ludic.inference.request import ChatCompletionRequest, InferenceSpec, ReturnSpec, ToolRequest
from ludic.inference.reward_types import PoolingType, RewardModelTrainingMode, ScoringRequest, ScoringResponse
from ludic.inference.sampling import SamplingConfig, SamplingParams

if TYPE_CHECKING:
    from ludic.inference.local.client import LocalChatClient
    from ludic.inference.local.reward import LocalRewardModel
    from ludic.inference.servers.openai_client import OpenAIChatClient
    from ludic.inference.vllm.client import VLLMChatClient
    from ludic.inference.vllm.launch import start_vllm_server, wait_for_vllm_health
    from ludic.inference.vllm.reward_client import VLLMClient
    from ludic.inference.vllm.scoring import VLLMScoringClient

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
    "VLLMChatClient",
    "VLLMClient",
    "VLLMExtensions",
    "VLLMScoringClient",
    "VersionedClient",
    "start_vllm_server",
    "wait_for_vllm_health",
]
_LATE = {
    "LocalChatClient": "local.client",
    "LocalRewardModel": "local.reward",
    "OpenAIChatClient": "servers.openai_client",
    "VLLMChatClient": "vllm.client",
    "VLLMClient": "vllm.reward_client",
    "VLLMScoringClient": "vllm.scoring",
    "start_vllm_server": "vllm.launch",
    "wait_for_vllm_health": "vllm.launch",
}
"""Names that load more than the standard library -> their modules."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
