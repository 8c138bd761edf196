"""Request settings that only one kind of server understands."""

from ludic.inference.extensions.vllm import BackendExtensions as BackendExtensions, VLLMExtensions as VLLMExtensions
