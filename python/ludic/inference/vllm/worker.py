"""A path that command lines of vLLM servers name; the module is
`ludic.inference.vllm.in_server.worker`."""

from ludic.inference.vllm.in_server.worker import WeightWorker

__all__ = ["WeightWorker"]
