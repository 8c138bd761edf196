"""The part of a tensor-parallel output layer that one rank has: some columns of the vocabulary.

torch's `ColwiseParallel` makes the weights [V, D] of the layer a DTensor that is cut along V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ludic.errors import ConfigError
from ludic.models.sharding import find_own_region


@dataclass(frozen=True)
class VocabularyShard:
    """Where the columns of this rank begin, and the ranks that have the others."""

    start: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, weight: DTensor) -> VocabularyShard:
        """The shard of [V, D] weights. Raises ConfigError for weights that are cut another way."""
        if weight.device_mesh.ndim != 1 or weight.placements != (Shard(0),):
            raise ConfigError(
                f"the output layer is placed as {weight.placements}, not cut along the vocabulary over one mesh dimension"
            )
        return cls(find_own_region(weight)[0][0], weight.device_mesh.get_group())

    def add(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place. All ranks of the group call it."""
        dist.all_reduce(values, group=self.group)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """The elementwise maximum over ranks. All ranks of the group call it."""
        result = values.clone()
        dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self.group)
        return result
