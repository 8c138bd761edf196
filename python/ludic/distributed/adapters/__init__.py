"""Publishers by receiver: models in this process, vLLM, SGLang, LoRA adapters, reward models.

"Adapters" connect `ludic.distributed.interfaces` to each kind of receiver. The package keeps
this name because `ludic.distributed.adapters.vllm` is a documented path.
"""

from ludic.distributed.adapters.checkpoint import create_checkpoint_publisher
from ludic.distributed.adapters.lora import create_lora_publisher
from ludic.distributed.adapters.reward_model import RMPublisherAdapter, create_rm_publisher
from ludic.distributed.adapters.vllm import VllmControlPlane, VllmTensorCommunicator, create_vllm_publisher
from ludic.distributed.publisher import LocalPublisher

__all__ = [
    "LocalPublisher",
    "RMPublisherAdapter",
    "VllmControlPlane",
    "VllmTensorCommunicator",
    "create_checkpoint_publisher",
    "create_lora_publisher",
    "create_rm_publisher",
    "create_vllm_publisher",
]
