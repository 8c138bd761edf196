"""`FSDPConfig`: how a model is shared out over ranks, in the words of FSDP, and `shard`, which does
it with `models.sharding` (FSDP2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from ludic.errors import ConfigError, check_value
from ludic.models.sharding import ShardingSettings, enable_checkpointing, make_mesh, shard_model

Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


@dataclass(frozen=True)
class FSDPConfig:
    """How a model is shared out over ranks.

    >>> model = shard(model, FSDPConfig(sharding_strategy="SHARD_GRAD_OP"))
    """

    sharding_strategy: Strategy = "FULL_SHARD"
    """`FULL_SHARD`: each rank has a part of weights, gradients and optimizer state, and gathers the
    weights of a block for each pass. `SHARD_GRAD_OP`: the same, but weights that the forward pass
    gathered stay for the backward pass. `NO_SHARD`: each rank has the whole model, and gradients
    are summed over ranks."""
    mixed_precision: bool = True
    """Compute in bfloat16 over weights that are stored and stepped in float32; gradients are summed
    in float32. False: compute in the dtype of the weights."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in the memory of the CPU. Needs CUDA devices."""
    auto_wrap_min_params: int = 1_000_000
    """Parameters of a module that is gathered on its own, for models that name no blocks
    (transformers' `_no_split_modules`)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    clip_grad: float | None = 1.0
    """L2 norm to which the gradient of all ranks is clipped. None means no clipping."""

    def __post_init__(self) -> None:
        check_value("sharding_strategy", self.sharding_strategy, choices=get_args(Strategy))
        check_value("auto_wrap_min_params", self.auto_wrap_min_params, least=1)
        check_value("clip_grad", self.clip_grad, "None turns clipping off", optional=True, above=0)
        if self.cpu_offload and self.sharding_strategy == "NO_SHARD":
            raise ConfigError("cpu_offload needs a sharded model, and sharding_strategy is NO_SHARD; use FULL_SHARD")

    @property
    def shards(self) -> bool:
        """Whether a rank has only a part of the model."""
        return self.sharding_strategy != "NO_SHARD"


def shard(model: nn.Module, config: FSDPConfig) -> nn.Module:
    """Share out `model`, which has the same weights on every rank, in place. Returns it. All ranks
    call this, before the optimizer is made. Raises ConfigError without a process group."""
    if not config.shards:
        if config.mixed_precision:
            model.float()
        if config.gradient_checkpointing:
            enable_checkpointing(model)
        return model
    settings = ShardingSettings(
        param_dtype=torch.bfloat16 if config.mixed_precision else None,
        cpu_offload=config.cpu_offload,
        activation_checkpointing=config.gradient_checkpointing,
        reshard_after_forward=config.sharding_strategy == "FULL_SHARD",
        block_parameters=config.auto_wrap_min_params,
    )
    device = next(model.parameters()).device
    return shard_model(model, settings, make_mesh(settings, device))
