"""Request settings of one kind of server."""

from ludic.inference.extensions.base import BackendExtensions
from ludic.inference.extensions.vllm import VLLMExtensions

__all__ = ["BackendExtensions", "VLLMExtensions"]
