"""Publishers: they send new weights from the trainer to the models that are sampled from."""

from ludic.distributed.adapters.checkpoint import create_checkpoint_publisher
from ludic.distributed.adapters.lora import create_lora_publisher
from ludic.distributed.adapters.reward_model import RMPublisherAdapter, create_rm_publisher
from ludic.distributed.adapters.vllm import VllmControlPlane, VllmTensorCommunicator, create_vllm_publisher
from ludic.distributed.interfaces import ControlPlane, PolicyPublisher, TensorCommunicator, WeightMetadata, WeightPublisher
from ludic.distributed.publisher import BroadcastPolicyPublisher, LocalPublisher, Rank0OnlyPublisher

__all__ = [
    "BroadcastPolicyPublisher",
    "ControlPlane",
    "LocalPublisher",
    "PolicyPublisher",
    "RMPublisherAdapter",
    "Rank0OnlyPublisher",
    "TensorCommunicator",
    "VllmControlPlane",
    "VllmTensorCommunicator",
    "WeightMetadata",
    "WeightPublisher",
    "create_checkpoint_publisher",
    "create_lora_publisher",
    "create_rm_publisher",
    "create_vllm_publisher",
]
