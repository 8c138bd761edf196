"""The old path of `ludic.inference.vllm.in_server.worker`, which command lines of vLLM servers may
still name."""

from ludic.inference.vllm.in_server.worker import WeightWorker

__all__ = ["WeightWorker"]
