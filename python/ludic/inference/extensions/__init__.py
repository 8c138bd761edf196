"""Request settings that only one kind of server understands."""

from ludic.inference.extensions.vllm import BackendExtensions, VLLMExtensions

__all__ = ["BackendExtensions", "VLLMExtensions"]
