"""Values that the ranks exchange with each other, and which of them compute the same rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ludic.errors import ConfigError
from ludic.models.context_parallel import ContextGroup


class _Groups:
    """What `start` and `split_context` set."""

    context: ContextGroup | None = None
    timeout: timedelta | None = None


_groups = _Groups()


def prepare_groups(timeout: timedelta | None) -> None:
    """Have later process groups wait at most `timeout`, and each rank compute its own rows."""
    _groups.context, _groups.timeout = None, timeout


def is_distributed() -> bool:
    """Whether there is more than one rank."""
    return world_size() > 1


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def split_context(size: int) -> None:
    """Have each `size` ranks that follow each other compute the same rows, each a slice of them
    (`models.context_parallel`): of 4 ranks and size 2, 0 and 1 have the same samples. All ranks
    call it, after `start` and before the trainer is made. Raises ConfigError for a size that does
    not divide the number of ranks."""
    world = world_size()
    if size < 1 or world % size:
        raise ConfigError(f"sharding.context ({size}) must be >= 1 and divide the number of ranks ({world})")
    members = [list(range(first, first + size)) for first in range(0, world, size)] if size > 1 else []
    groups = [dist.new_group(each, timeout=_groups.timeout) for each in members]
    _groups.context = ContextGroup(groups[rank() // size], rank() % size, size) if groups else None


def context() -> ContextGroup | None:
    """The ranks that compute the same rows as this one; None if it computes its own alone."""
    return _groups.context


def sum_over_ranks(values: Sequence[float], device: torch.device | str) -> list[float]:
    """Sum each value over the ranks, in float64. Ranks that compute the same rows count once."""
    return _reduce(values, device, add_over_ranks)


def max_over_ranks(values: Sequence[float], device: torch.device | str) -> list[float]:
    """Return the maximum of each value over the ranks."""
    return _reduce(values, device, lambda packed: dist.all_reduce(packed, op=dist.ReduceOp.MAX))


def add_over_ranks(tensor: Tensor) -> None:
    """Replace a tensor by its sum over the ranks; those that compute the same rows count once."""
    if is_distributed():
        dist.all_reduce(tensor if (own := context()) is None or own.rank == 0 else tensor.zero_())


def _reduce(values: Sequence[float], device: torch.device | str, reduce: Callable[[Tensor], object]) -> list[float]:
    if not is_distributed():
        return list(values)
    packed = torch.tensor(list(values), dtype=torch.float64, device=device)
    reduce(packed)
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
    return [json.loads(each.cpu().numpy().tobytes()) for each in gather_padded(own, ord(" "))]


def gather_padded(own: Tensor, fill: float) -> list[Tensor]:
    """The tensor [N] of each rank, all with `fill` at their end to the largest N. It is on the
    device of the process group's collectives."""
    if not is_distributed():
        return [own]
    padded = own.new_full((int(max_over_ranks([float(len(own))], own.device)[0]),), fill)
    padded[: len(own)] = own
    everyone = [torch.empty_like(padded) for _ in range(world_size())]
    dist.all_gather(everyone, padded)
    return everyone


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
