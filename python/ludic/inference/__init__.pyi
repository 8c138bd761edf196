from ludic.inference.client import ChatClient as ChatClient, VersionedClient as VersionedClient
from ludic.inference.extensions import BackendExtensions as BackendExtensions, VLLMExtensions as VLLMExtensions
from ludic.inference.local.client import LocalChatClient as LocalChatClient
from ludic.inference.local.reward import LocalRewardModel as LocalRewardModel
from ludic.inference.request import (
    ChatCompletionRequest as ChatCompletionRequest,
    InferenceSpec as InferenceSpec,
    ReturnSpec as ReturnSpec,
    SamplingConfig as SamplingConfig,
    SamplingParams as SamplingParams,
    ToolRequest as ToolRequest,
)
from ludic.inference.reward_types import (
    PoolingType as PoolingType,
    RewardModelTrainingMode as RewardModelTrainingMode,
    ScoringRequest as ScoringRequest,
    ScoringResponse as ScoringResponse,
)
from ludic.inference.servers.openai_client import OpenAIChatClient as OpenAIChatClient
from ludic.inference.vllm.client import VLLMChatClient as VLLMChatClient
from ludic.inference.vllm.launch import start_vllm_server as start_vllm_server, wait_for_vllm_health as wait_for_vllm_health
from ludic.inference.vllm.reward_client import VLLMClient as VLLMClient
from ludic.inference.vllm.scoring import VLLMScoringClient as VLLMScoringClient
