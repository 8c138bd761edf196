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
    from ludic.inference.local import LocalChatClient
    from ludic.inference.local_reward import LocalRewardModel
    from ludic.inference.openai_client import OpenAIChatClient
    from ludic.inference.vllm_client import VLLMChatClient
    from ludic.inference.vllm_reward_client import VLLMClient
    from ludic.inference.vllm_scoring import VLLMScoringClient
    from ludic.inference.vllm_utils import start_vllm_server, wait_for_vllm_health

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
    "LocalChatClient": "local",
    "LocalRewardModel": "local_reward",
    "OpenAIChatClient": "openai_client",
    "VLLMChatClient": "vllm_client",
    "VLLMClient": "vllm_reward_client",
    "VLLMScoringClient": "vllm_scoring",
    "start_vllm_server": "vllm_utils",
    "wait_for_vllm_health": "vllm_utils",
}
"""Names that load more than the standard library -> their modules."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
