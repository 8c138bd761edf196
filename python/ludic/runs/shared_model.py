"""The model of a run with `sharding`: whole on rank 0, which samples, measures and saves with it,
and shared out over all ranks while it is trained.

    rank 0        parts.model: whole      --shard_copy--> its shards
    other ranks   parts.model: a skeleton               their shards  --copy_home--> whole of rank 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from ludic.errors import ConfigError
from ludic.models.sharded_loading import copy_home, drop_weights, shard_copy
from ludic.models.sharding import make_mesh
from ludic.recipes.actors import uses_queue
from ludic.recipes.model import build_sharding, has_no_weights, is_shared_out
from ludic.recipes.processes import choose_kind
from ludic.recipes.schema import Recipe
from ludic.recipes.sections import ShardingSection, check_sharding
from ludic.training import ranks
from ludic.training.config import TrainerConfig
from ludic.training.evaluators.protocol import Evaluator, runs_on_all_ranks

ConfigT = TypeVar("ConfigT", bound=TrainerConfig)


def prepare_sharding(section: ShardingSection, device: str) -> None:
    """Group the ranks by `context`. Raises `ConfigError` for what this run cannot follow."""
    check_sharding(section, world_size=ranks.world_size())
    if section.cpu_offload and torch.device(device).type != "cuda":
        raise ConfigError(f"sharding.cpu_offload moves weights out of GPUs, and trainer.model_device is {device}; leave it off")
    if ranks.is_distributed():
        ranks.split_context(section.context)


def check_sampling(recipe: Recipe) -> None:
    """Raise `ConfigError` if rank 0 would sample from a whole model that gets new weights at other
    times than after each step: an evaluation, or a start from a checkpoint, brings them too."""
    samples_here = choose_kind(recipe.inference) == "local" and not uses_queue(recipe)
    every = recipe.trainer.sync_every_steps
    if is_shared_out(recipe.sharding) and samples_here and recipe.steps and every != 1:
        kind = recipe.sharding.kind
        raise ConfigError(f"trainer.sync_every_steps ({every}) must be 1 with sharding.kind={kind}, or old weights are sampled")


def place_model(model: Any, section: ShardingSection, device: str) -> Any:
    """The model on its device. If the ranks share it out, only rank 0 keeps its weights. With
    `param_dtype`, one process stores and steps float32, as the shards of several ranks do."""
    if has_no_weights(section):
        return drop_weights(model)
    if computes_alone(section):
        model.float()
    return model.to(device)


def computes_alone(section: ShardingSection) -> bool:
    """Whether this process is to follow `param_dtype` without FSDP, since it is the only one."""
    return section.param_dtype is not None and not is_shared_out(section)


def choose_precision(cfg: ConfigT, section: ShardingSection) -> ConfigT:
    """The trainer's settings, with bfloat16 passes where one process follows `param_dtype`."""
    if computes_alone(section) and section.param_dtype == "bfloat16":
        return replace(cfg, mixed_precision_dtype="bf16")
    return cfg


def describe_precision(section: ShardingSection) -> str | None:
    """A line about what one process does instead of `param_dtype`; None where there is nothing to
    say."""
    if not computes_alone(section):
        return None
    how = ", its passes in bfloat16 by autocast" if section.param_dtype == "bfloat16" else ""
    return f"One process trains the whole model: sharding.param_dtype={section.param_dtype} makes its weights float32{how}"


class SharedModel:
    """The sharded model that a phase trains, and rank 0's whole one. All ranks call the methods."""

    def __init__(self, section: ShardingSection, device: str) -> None:
        self._settings = build_sharding(section)
        self._mesh = make_mesh(self._settings, device)
        self._trained: nn.Module | None = None

    def shard(self, whole: nn.Module) -> nn.Module:
        """A sharded model with the weights of rank 0's `whole`. The one of an earlier phase is
        given up."""
        self._trained = None
        tensors = [*whole.named_parameters(), *whole.named_buffers()]
        own = {name: [str(value.dtype), list(value.shape)] for name, value in tensors}
        with ranks.agree("sharding the model"):
            there: Mapping[str, Any] = ranks.ask_rank_0("describing the model", lambda: own)
            for name in sorted(own.keys() | there.keys()):
                if own.get(name) != there.get(name):
                    raise ConfigError(
                        f"rank {ranks.rank()} has {name} {own.get(name)}, rank 0 {there.get(name)}; give all the same files"
                    )
        self._trained = shard_copy(whole, self._settings, self._mesh, agree=ranks.agree)
        return self._trained

    def gather_to_rank0(self, whole: nn.Module) -> None:
        """Copy what was trained into rank 0's `whole`. Before a phase there is nothing to copy."""
        if self._trained is not None:
            copy_home(self._trained, whole, agree=ranks.agree)


class GatheredEvaluator:
    """An evaluator that runs on rank 0 with the whole model, which gets the trained weights before.

    It takes part on all ranks, and all get the metrics; the records are rank 0's alone.
    """

    on_all_ranks = True

    def __init__(self, inner: Evaluator, model: SharedModel, whole: nn.Module) -> None:
        assert not runs_on_all_ranks(inner), "it can evaluate the sharded model itself"
        self._inner, self._model, self._whole = inner, model, whole

    async def eval(self, **options: Any) -> tuple[list[Any], dict[str, float]]:
        """(records, metrics)."""
        self._model.gather_to_rank0(self._whole)
        records: list[Any] = []
        with ranks.rank_0_alone("the evaluation") as shared:
            if ranks.rank() == 0:
                records, metrics = await self._inner.eval(**options)
                shared.append(metrics)
        return records, shared[0]
