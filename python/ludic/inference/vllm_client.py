"""The name that `VLLMChatClient` is documented under; it lives in `ludic.inference.vllm.client`."""

from ludic.inference.vllm.client import VLLMChatClient

__all__ = ["VLLMChatClient"]
