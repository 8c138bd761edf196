"""A path that command lines of vLLM servers name; the module is
`ludic.inference.vllm.in_server.think_processor`."""

from ludic.inference.vllm.in_server.think_processor import GlobalThinkProcessor

__all__ = ["GlobalThinkProcessor"]
