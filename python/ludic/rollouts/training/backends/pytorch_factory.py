"""Builds a `PyTorchTrainingBackend` in one call, or from its parts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ludic.errors import ConfigError, check_value
from ludic.models.loading import load_model, load_tokenizer
from ludic.rollouts.training.backends.pytorch import METADATA, PyTorchTrainingBackend
from ludic.rollouts.training.rl_losses import sft_loss

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
DEVICE_TYPES = ("cuda", "cpu", "mps")


def create_pytorch_backend(
    model_name: str | Path,
    checkpoint_dir: str | Path,
    device_type: str | None = None,
    dtype: str = "bfloat16",
    gpu_rank: int = 0,
    learning_rate: float = 1e-4,
    adam_betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    loss_fn: Any = None,
    *,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> PyTorchTrainingBackend:
    """A backend with AdamW.

    `model_name`: a hub id, a folder in Hugging Face layout, or a checkpoint of a backend, whose
    weights are then the start; one that was saved without a tokenizer gives none. `device_type`:
    None takes a GPU if there is one. Weights in bfloat16 are stepped as float32 copies. `loss_fn`:
    None is cross entropy. `model` replaces the one that `model_name` names; then `tokenizer` is the
    caller's, too. `options` go to `PyTorchTrainingBackend`.
    """
    device = _choose_device(device_type, gpu_rank)
    if model is None:
        model = load_hf_model(str(model_name), parse_dtype(dtype), compute_device_map_single_gpu(device.type, gpu_rank))
        folder = Path(model_name)
        has_tokenizer = not (folder / METADATA).is_file() or (folder / "tokenizer_config.json").is_file()
        if tokenizer is None and has_tokenizer:
            tokenizer = load_tokenizer(str(model_name))
    else:
        model = model.to(device)
    optimizer = create_adamw_optimizer(model, learning_rate, adam_betas, weight_decay=weight_decay)
    loss_fn = create_cross_entropy_loss() if loss_fn is None else loss_fn
    return PyTorchTrainingBackend(model, optimizer, loss_fn, checkpoint_dir, device, tokenizer=tokenizer, **options)


def create_backend_with_scheduler(
    model_name: str | Path,
    checkpoint_dir: str | Path,
    num_training_steps: int,
    warmup_ratio: float = 0.03,
    device_type: str | None = None,
    dtype: str = "bfloat16",
    gpu_rank: int = 0,
    learning_rate: float = 1e-4,
    adam_betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    loss_fn: Any = None,
    **options: Any,
) -> tuple[PyTorchTrainingBackend, LambdaLR]:
    """`create_pytorch_backend`, and its schedule: `create_warmup_cosine_scheduler` over
    `num_training_steps`. The backend steps it."""
    check_value("warmup_ratio", warmup_ratio, "it is a part of num_training_steps", least=0, most=1)
    backend = create_pytorch_backend(
        model_name, checkpoint_dir, device_type, dtype, gpu_rank, learning_rate, adam_betas, weight_decay, loss_fn, **options
    )
    warmup = int(num_training_steps * warmup_ratio)
    backend.scheduler = scheduler = create_warmup_cosine_scheduler(backend.optimizer, warmup, num_training_steps)
    return backend, scheduler


def parse_dtype(dtype_str: str) -> torch.dtype:
    """The dtype of this name: bfloat16, float32 or float16."""
    check_value("dtype", dtype_str, choices=DTYPES)
    return DTYPES[dtype_str]


def compute_device_map_single_gpu(device_type: str, gpu_rank: int) -> dict[str, str] | None:
    """Where the whole model goes: `{"": "cuda:1"}`; None for the CPU, where it is loaded anyway."""
    _check_device_type(device_type)
    if device_type == "cuda":
        return {"": f"cuda:{gpu_rank}"}
    return {"": device_type} if device_type == "mps" else None


def load_hf_model(model_name: str, torch_dtype: torch.dtype, device_map: dict[str, str] | None) -> Any:
    """A causal language model in `torch_dtype`, on the device that `device_map` names. Weights are
    read from safetensors only, and no code of the repository is run."""
    names = [name for name, dtype in DTYPES.items() if dtype == torch_dtype]
    model = load_model(model_name, names[0])
    return model if device_map is None else model.to(device_map[""])


def create_adamw_optimizer(
    model: nn.Module,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.AdamW:
    """AdamW over the parameters that require a gradient."""
    check_value("lr", lr, "1e-5 to 1e-4 is usual", above=0, below=1)
    return torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
    )


def create_cross_entropy_loss() -> Any:
    """`sft_loss`: the mean over all trained tokens."""
    return sft_loss


def create_warmup_cosine_scheduler(
    optimizer: torch.optim.Optimizer, num_warmup_steps: int, num_training_steps: int, min_lr_ratio: float = 0.1
) -> LambdaLR:
    """The rate rises from a tenth to its full value over `num_warmup_steps`, then falls by a cosine
    to `min_lr_ratio` of it at `num_training_steps`, where it stays.

    Example: 2 warm-up steps of 6, ratio 0: 0.1, 0.55, 1, 0.85, 0.5, 0.15, 0.
    """
    if not 0 <= num_warmup_steps <= num_training_steps or num_training_steps < 1:
        raise ConfigError(f"num_warmup_steps ({num_warmup_steps}) must be in [0, num_training_steps ({num_training_steps})]")
    check_value("min_lr_ratio", min_lr_ratio, least=0, most=1)

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return 0.1 + 0.9 * step / num_warmup_steps
        progress = min(1.0, (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps))
        return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)


def _choose_device(device_type: str | None, gpu_rank: int) -> torch.device:
    if device_type is None:
        available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        device_type = next((name for name, is_there in available.items() if is_there), "cpu")
    _check_device_type(device_type)
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device_type is cuda, and torch sees no CUDA device; leave device_type out to use the available device")
    return torch.device("cuda", gpu_rank) if device_type == "cuda" else torch.device(device_type)


def _check_device_type(device_type: str) -> None:
    check_value("device_type", device_type, choices=DEVICE_TYPES)
