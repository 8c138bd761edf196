"""The `sharding` section of a recipe on this process: whether its model is shared out, and how."""

from __future__ import annotations

from typing import Any

import torch

from ludic.models.sharding import ShardingSettings
from ludic.recipes.sharding_section import ShardingSection
from ludic.training import ranks


def is_shared_out(section: ShardingSection) -> bool:
    """Whether the ranks of this run share out its model. One process never does."""
    return section.kind != "none" and ranks.is_distributed()


def has_no_weights(section: ShardingSection) -> bool:
    """Whether this rank gets its shards from rank 0, and builds the model without weights."""
    return is_shared_out(section) and ranks.rank() > 0


def recomputes_activations(recipe: Any) -> bool:
    """Whether the backward pass of a recipe's trainers recomputes activations, by either name."""
    return bool(recipe.gradient_checkpointing or recipe.sharding.activation_checkpointing)


def build_sharding(section: ShardingSection) -> ShardingSettings:
    """The settings of a section, whose kind is not none."""
    return ShardingSettings(
        "hybrid" if section.kind == "hybrid" else "full",
        shards=section.shards,
        param_dtype=None if section.param_dtype is None else getattr(torch, section.param_dtype),
        reduce_dtype=getattr(torch, section.reduce_dtype),
        cpu_offload=section.cpu_offload,
        activation_checkpointing=section.activation_checkpointing,
    )
