"""The precision of forward passes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ludic.training.config import TrainerConfig


def autocast(cfg: TrainerConfig) -> AbstractContextManager[Any]:
    """Runs the forward passes inside in bfloat16 where `mixed_precision_dtype` asks for it."""
    if cfg.mixed_precision_dtype is None:
        return nullcontext()
    return torch.autocast(torch.device(cfg.model_device).type, dtype=torch.bfloat16)
