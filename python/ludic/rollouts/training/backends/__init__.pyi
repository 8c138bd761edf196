from ludic.rollouts.training.backends.fsdp import FSDPConfig as FSDPConfig, FSDPTrainingBackend as FSDPTrainingBackend
from ludic.rollouts.training.backends.protocol import TrainingBackend as TrainingBackend
from ludic.rollouts.training.backends.pytorch import PyTorchTrainingBackend as PyTorchTrainingBackend
from ludic.rollouts.training.backends.pytorch_factory import (
    compute_device_map_single_gpu as compute_device_map_single_gpu,
    create_adamw_optimizer as create_adamw_optimizer,
    create_backend_with_scheduler as create_backend_with_scheduler,
    create_cross_entropy_loss as create_cross_entropy_loss,
    create_pytorch_backend as create_pytorch_backend,
    create_warmup_cosine_scheduler as create_warmup_cosine_scheduler,
    load_hf_model as load_hf_model,
    parse_dtype as parse_dtype,
)
