"""The settings of a model that the ranks of a run share out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from ludic.errors import ConfigError

KINDS = ("none", "full", "hybrid")
_DTYPES = ("float32", "bfloat16")


@dataclass
class ShardingSection:
    """A model that several ranks share out (FSDP2), so that each has a part of its weights,
    gradients and optimizer. Needs several ranks: `ranks=N`, torchrun or srun."""

    kind: str = "none"
    """`none`: each rank has the whole model. `full`: each has one part of every weight. `hybrid`:
    each group of `shards` ranks has a copy, shared out over its ranks."""
    shards: Optional[int] = None  # noqa: UP045  OmegaConf reads this annotation at run time
    """Ranks that share one copy of a hybrid model; null: the ranks of one machine."""
    param_dtype: Optional[str] = None  # noqa: UP045
    """bfloat16 or float32: type of forward and backward passes, over weights that are stored and
    stepped in float32; null: `dtype`. One process computes in bfloat16 by autocast."""
    reduce_dtype: str = "float32"
    """Type in which gradients are summed over ranks: float32 or bfloat16."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer in the memory of the CPU. Needs GPUs."""
    activation_checkpointing: bool = False
    """Another name of `gradient_checkpointing`."""


def check_sharding(section: ShardingSection, *, world_size: int) -> None:
    """Raise `ConfigError` for a value that does not exist, for settings without `kind`, and for
    settings that one process cannot follow."""
    if section.kind not in KINDS:
        raise ConfigError(f"sharding.kind ({section.kind}) must be one of {', '.join(KINDS)}")
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(section, name)
        if dtype is not None and dtype not in _DTYPES:
            raise ConfigError(f"sharding.{name} ({dtype}) must be float32 or bfloat16: float16 needs loss scaling")
    if section.kind == "none" and section != ShardingSection(activation_checkpointing=section.activation_checkpointing):
        raise ConfigError("the settings of sharding need sharding.kind=full or hybrid, and it is none: no model is shared out")
    if section.shards is not None and (section.kind != "hybrid" or section.shards < 1 or world_size % section.shards):
        raise ConfigError(
            f"sharding.shards ({section.shards}) is for sharding.kind=hybrid, which is {section.kind}, and must divide the number of "
            f"ranks ({world_size})"
        )
    if world_size == 1 and section.cpu_offload:
        raise ConfigError(
            "sharding.cpu_offload needs several processes, and this run is one; set ranks=N, start it with torchrun or srun, or leave "
            "it out, also on resume: sharding.cpu_offload=false"
        )
