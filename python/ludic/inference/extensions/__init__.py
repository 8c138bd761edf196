"""Request settings that only one kind of server understands."""

from ludic.inference.extensions.base import BackendExtensions
from ludic.inference.extensions.vllm import VLLMExtensions

__all__ = ["BackendExtensions", "VLLMExtensions"]
