"""Publishers for the inference engines that we know."""

from ludic.distributed.adapters.local import LocalPublisher
from ludic.distributed.adapters.vllm import VllmControlPlane, VllmTensorCommunicator, create_vllm_publisher

__all__ = ["LocalPublisher", "VllmControlPlane", "VllmTensorCommunicator", "create_vllm_publisher"]
