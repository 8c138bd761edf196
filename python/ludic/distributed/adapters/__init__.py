"""Publishers for the inference engines that we know."""

from ludic.distributed.adapters.local import LocalPublisher
from ludic.distributed.adapters.reward_model import RMPublisherAdapter, create_rm_publisher
from ludic.distributed.adapters.vllm import VllmControlPlane, VllmTensorCommunicator, create_vllm_publisher

__all__ = [
    "LocalPublisher",
    "RMPublisherAdapter",
    "VllmControlPlane",
    "VllmTensorCommunicator",
    "create_rm_publisher",
    "create_vllm_publisher",
]
