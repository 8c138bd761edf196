"""The old path of `ludic.inference.vllm.in_server.think_processor`, which command lines of vLLM
servers may still name."""

from ludic.inference.vllm.in_server.think_processor import GlobalThinkProcessor

__all__ = ["GlobalThinkProcessor"]
