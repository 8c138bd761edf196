"""The precision of forward passes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ludic.training.config import TrainerConfig


def autocast(cfg: TrainerConfig) -> AbstractContextManager[Any]:
    """A context in which forward passes run in bfloat16 if `mixed_precision_dtype` is set."""
    if cfg.mixed_precision_dtype is None:
        return nullcontext()
    return torch.autocast(torch.device(cfg.model_device).type, dtype=torch.bfloat16)
