"""`FSDPTrainingBackend`: `PyTorchTrainingBackend` of a model that several ranks share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.models.sharding import gather_tensor, reshard
from ludic.rollouts.training.backends.pytorch import PyTorchTrainingBackend, require_same_shapes
from ludic.training import ranks
from ludic.training.backend.fsdp import FSDPConfig as FSDPConfig, shard

Optimizer = torch.optim.Optimizer
Scheduler = torch.optim.lr_scheduler.LRScheduler


class FSDPTrainingBackend(PyTorchTrainingBackend):
    """Trains a model that is shared out over the ranks of a process group.

    >>> dist.init_process_group(backend="nccl")
    >>> make_optimizer = lambda model: torch.optim.AdamW(model.parameters())
    >>> backend = FSDPTrainingBackend(model, make_optimizer, sft_loss, Path("checkpoints"))

    All ranks make one, with the same weights, and call every method. Each passes its own rows to
    `forward_backward`; the gradient is over all rows, and `loss` and statistics are over all ranks.
    With NO_SHARD and several ranks gradients are summed in `optim_step`, which returns `grad_norm`;
    `forward_backward` does not. Operations are computed when called: their collectives must not
    cross others of the same ranks. Checkpoints are read by any number of ranks, and by
    `PyTorchTrainingBackend`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_fn: Callable[[nn.Module], Optimizer],
        loss_fn: Any,
        checkpoint_dir: str | Path,
        config: FSDPConfig | None = None,
        checkpoint_path: str | Path | None = None,
        device: torch.device | str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        step: int = 0,
        scheduler: Scheduler | Callable[[Optimizer], Scheduler] | None = None,
        **options: Any,
    ) -> None:
        """`optimizer_fn` is called with the sharded model. `device`: None is the GPU of the local
        rank, or the CPU without one. `rank` and `world_size` are checked against the process group.
        `scheduler` is made by a function of the optimizer. `checkpoint_path`: a folder of
        `save_checkpoint` to begin with. `options` are arguments of `PyTorchTrainingBackend`."""
        _check_group(rank, world_size)
        self.config = FSDPConfig() if config is None else config
        target = _choose_device() if device is None else torch.device(device)
        if target.type == "cuda":
            torch.cuda.set_device(target)
        shard(model.to(target), self.config)
        optimizer = optimizer_fn(model)
        if scheduler is not None and not isinstance(scheduler, Scheduler):
            scheduler = scheduler(optimizer)
        super().__init__(
            model,
            optimizer,
            loss_fn,
            checkpoint_dir,
            device=target,
            weight_version=step,
            current_step=step,
            max_grad_norm=self.config.clip_grad,
            scheduler=scheduler,
            in_thread=False,
            **options,
        )
        if self.config.mixed_precision and not self.config.shards:
            self.cfg = replace(self.cfg, mixed_precision_dtype="bf16")
        if checkpoint_path is not None:
            self.load(checkpoint_path).wait()

    @torch.no_grad()
    def _copy_weights(self) -> dict[str, Tensor]:
        """The whole state dict on rank 0, an empty one elsewhere. One tensor at a time is
        gathered."""
        reshard(self.model)
        weights: dict[str, Tensor] = {}
        for name, value in self.model.state_dict().items():
            whole = gather_tensor(value.detach())
            if ranks.rank() == 0:
                weights[name] = whole.to("cpu", copy=True)
        return weights

    @torch.no_grad()
    def _set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set the weights to those that rank 0 has; other ranks may pass an empty mapping."""
        state = self.model.state_dict()
        with ranks.agree("setting weights"):
            if ranks.rank() == 0:
                require_same_shapes(state, weights)
        whole: dict[str, Tensor] = {}
        for name, like in state.items():
            value = weights[name].to(like.device, like.dtype) if ranks.rank() == 0 else torch.empty(like.shape, dtype=like.dtype)
            whole[name] = value.to(like.device).contiguous()
            dist.broadcast(whole[name], src=0)
        super()._set_weights(whole)


def _check_group(rank: int | None, world_size: int | None) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError("FSDPTrainingBackend needs a process group; start with torchrun, and call ludic.training.ranks.start()")
    for name, given, own in (("rank", rank, dist.get_rank()), ("world_size", world_size, dist.get_world_size())):
        if given is not None and given != own:
            raise ConfigError(f"{name} ({given}) differs from the process group's ({own}); leave it out")


def _choose_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", dist.get_rank() % torch.cuda.device_count()))
    return torch.device("cuda", local)
