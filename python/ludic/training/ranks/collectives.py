"""Reductions over ranks. Without `torch.distributed` there is one rank and each reduction is the
identity. Nothing is pickled: values travel as numbers and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

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


def _reduce(values: Sequence[float], device: torch.device | str, operation: dist.ReduceOp.RedOpType) -> list[float]:
    packed = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(packed, op=operation)
    return [float(value) for value in packed.cpu()]


def union_over_ranks(names: Sequence[str], device: torch.device | str) -> list[str]:
    """Return the names that at least one rank has, without duplicates and in the same order on all
    ranks.

    Example: rank 0 has a, b and rank 1 has c, b: both get a, b, c.
    """
    return list(dict.fromkeys(name for each in gather_json(list(names), device) for name in each))


def gather_json(value: Any, device: torch.device | str | None = None) -> list[Any]:
    """The value of each rank, in the order of ranks, on all ranks. `device`: where the bytes
    travel; by default where the process group needs them.

    Example: rank 0 has "a" and rank 1 has "bcd". Both are padded to 5 bytes, `"a"  ` and `"bcd"`.
    """
    if not is_distributed():
        return [value]
    device = group_device() if device is None else device
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = int(max_over_ranks([float(len(own))], device)[0])
    padded = torch.full((size,), ord(" "), dtype=torch.uint8, device=device)
    padded[: len(own)] = own
    everyone = [torch.empty_like(padded) for _ in range(world_size())]
    dist.all_gather(everyone, padded)
    return [json.loads(each.cpu().numpy().tobytes()) for each in everyone]


def broadcast_bytes(content: bytes | memoryview | None, size: int, device: torch.device, *, src: int = 0) -> memoryview:
    """The `size` bytes that rank `src` passes as `content`, on all ranks, in memory that can be
    written to; others pass None."""
    own = torch.empty(size, dtype=torch.uint8) if content is None else torch.frombuffer(bytearray(content), dtype=torch.uint8)
    shared = own.to(device)
    dist.broadcast(shared, src=src)
    return shared.cpu().numpy().data


def group_device() -> torch.device:
    """Where the process group's collectives need their tensors: on the CPU if it has gloo, as the
    group of `start` always does."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
