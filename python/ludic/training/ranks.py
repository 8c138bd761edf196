"""Reductions over ranks. Without `torch.distributed` there is one rank and each reduction is the
identity."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist


def is_distributed() -> bool:
    """Whether there is more than one rank."""
    return world_size() > 1


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def sum_over_ranks(values: Sequence[float], device: torch.device | str) -> list[float]:
    """Sum each value over the ranks, in float64."""
    return _reduce(values, device, dist.ReduceOp.SUM) if is_distributed() else list(values)


def max_over_ranks(values: Sequence[float], device: torch.device | str) -> list[float]:
    """Return the maximum of each value over the ranks."""
    return _reduce(values, device, dist.ReduceOp.MAX) if is_distributed() else list(values)


def barrier() -> None:
    """Wait for all ranks."""
    if is_distributed():
        dist.barrier()


def _reduce(values: Sequence[float], device: torch.device | str, operation: dist.ReduceOp.RedOpType) -> list[float]:
    packed = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(packed, op=operation)
    return [float(value) for value in packed.cpu()]


def union_over_ranks(names: Sequence[str], device: torch.device | str) -> list[str]:
    """Return the names that at least one rank has, without duplicates and in the same order on all
    ranks.

    Example: rank 0 has a, b and rank 1 has c, b: both get a, b, c.
    """
    if not is_distributed():
        return list(dict.fromkeys(names))
    own = torch.tensor(list(json.dumps(list(names)).encode()), dtype=torch.uint8, device=device)
    size = int(max_over_ranks([float(len(own))], device)[0])
    padded = torch.full((size,), ord(" "), dtype=torch.uint8, device=device)
    padded[: len(own)] = own
    everyone = [torch.empty_like(padded) for _ in range(world_size())]
    dist.all_gather(everyone, padded)
    return list(dict.fromkeys(name for each in everyone for name in json.loads(bytes(each.tolist()))))
