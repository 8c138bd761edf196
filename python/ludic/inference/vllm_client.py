"""The documented path of the clients, which are in `ludic.inference.vllm`."""

from ludic.inference.vllm.client import VLLMChatClient
from ludic.inference.vllm.reward_client import VLLMClient

__all__ = ["VLLMChatClient", "VLLMClient"]
