"""Moves whole tensors to the ranks that write or publish them, and back, a bucket at a time.

    rank 0  [rows 0-2 of a] [rows 0-2 of b]        rank 0  a
    rank 1  [rows 3-5 of a] [rows 3-5 of b]   ->   rank 1  b

A tensor goes to its owner alone; no other rank ever holds all of it. `agree` is
`ludic.training.ranks.agree`: a context that raises on all ranks if its block fails on one, so that
no rank waits for the parts of another that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ludic.errors import ConfigError
from ludic.models.regions import count_elements, find_copy, find_region, make_slices, split_in_buckets
from ludic.models.sharding import find_cuts

Agree = Callable[[str], AbstractContextManager[None]]
BUCKET_BYTES = 512 << 20
"""Bytes that an owner receives before it hands them on."""


@dataclass(frozen=True)
class SharedTensor:
    """A tensor that is sharded, or that each rank has whole. `make` gives it, on all ranks
    together: it may compute it from others."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    """Where it is sent from and received."""
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor, make: Callable[[], Tensor] | None = None) -> SharedTensor:
        """`tensor`, or with `make` another one that looks like it."""
        device = torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device
        return cls(tensor.shape, tensor.dtype, device, (lambda: tensor) if make is None else make)

    @property
    def size(self) -> int:
        """Bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize


def send_to_owners(
    tensors: Mapping[str, SharedTensor],
    owners: Mapping[str, int],
    take: Callable[[str, Tensor], object],
    *,
    agree: Agree,
) -> None:
    """Call `take(name, whole tensor)` for each tensor on the rank that owns it. All ranks call it,
    with the same names in the same order."""
    arrived: dict[str, Tensor] = {}
    for names in split_in_buckets({name: tensor.size for name, tensor in tensors.items()}, BUCKET_BYTES):
        bucket = {name: tensors[name] for name in names}
        with agree("gathering weights"):
            _hand_on(arrived, take)
            arrived = make_buffers(bucket, owners)
        transfer(bucket, owners, arrived)
    with agree("gathering weights"):
        _hand_on(arrived, take)


def _hand_on(arrived: dict[str, Tensor], take: Callable[[str, Tensor], object]) -> None:
    for name in list(arrived):
        take(name, arrived.pop(name))


def make_buffers(bucket: Mapping[str, SharedTensor], owners: Mapping[str, int]) -> dict[str, Tensor]:
    """Room for the tensors that this rank will receive."""
    rank = dist.get_rank()
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for name, tensor in bucket.items()
        if owners[name] == rank
    }


def transfer(bucket: Mapping[str, SharedTensor], owners: Mapping[str, int], buffers: Mapping[str, Tensor]) -> None:
    """Fill the buffers of all owners. All ranks call it with the same bucket."""
    pending = _Pending()
    for tag, (name, tensor) in enumerate(bucket.items()):
        made = tensor.make().detach()
        if isinstance(made, DTensor):
            _exchange(made, owners[name], buffers.get(name), tag, pending)
        elif name in buffers:
            buffers[name].copy_(made)
    pending.wait()


class _Pending:
    """Messages that are on their way, and the calls to make when they have arrived."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.copies: list[tuple[Tensor, Tensor]] = []

    def add(self, operation: Any, tensor: Tensor, rank: int, tag: int) -> None:
        self.messages.append(dist.P2POp(operation, tensor, rank, tag=tag))

    def wait(self) -> None:
        for request in dist.batch_isend_irecv(self.messages) if self.messages else []:
            request.wait()
        for target, received in self.copies:
            target.copy_(received)


def _exchange(tensor: DTensor, owner: int, buffer: Tensor | None, tag: int, pending: _Pending) -> None:
    """Send this rank's part to the owner, or receive the parts of the others."""
    rank, mesh, local = dist.get_rank(), tensor.device_mesh, tensor.to_local()
    place = [int(each) for each in (mesh.mesh == owner).nonzero()[0]]
    for coordinate, region in find_copy(tensor.shape, mesh.shape, find_cuts(tensor), place):
        source = int(mesh.mesh[coordinate])
        if source == rank and buffer is None:
            pending.add(dist.isend, local.to(mesh.device_type).contiguous(), owner, tag)
        elif buffer is not None and source == rank:
            buffer[make_slices(region)].copy_(local)
        elif buffer is not None:
            target = buffer[make_slices(region)]
            room = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
            pending.add(dist.irecv, room, source, tag)
            if room is not target:
                pending.copies.append((target, room))


def send_to_shards(targets: Mapping[str, Tensor], wholes: Mapping[str, Tensor], *, agree: Agree) -> None:
    """Fill the sharded `targets` with the tensors of the same names that rank 0 has in `wholes`; on
    other ranks these are not read. A tensor of another dtype is converted. All ranks call it, with
    the same names in the same order."""
    sizes = {name: target.numel() * target.element_size() for name, target in targets.items()}
    for names in split_in_buckets(sizes, BUCKET_BYTES):
        pending = _Pending()
        with agree("sending weights"):
            for tag, name in enumerate(names):
                target = targets[name].detach()
                if not isinstance(target, DTensor):
                    raise ConfigError(f"{name} is not sharded, and has no shards to fill; call shard_model on the whole model")
                _spread(target, wholes[name].detach(), tag, pending)
        pending.wait()


def send_copies(tensors: Mapping[str, Tensor], *, agree: Agree) -> None:
    """Overwrite tensors that each rank has whole, such as buffers, with rank 0's. All ranks call
    it, with the same names in the same order."""
    with agree("sending buffers"):
        rooms = {name: tensor.detach().contiguous() for name, tensor in tensors.items() if tensor.numel()}
    for name, room in rooms.items():
        dist.broadcast(room.view(-1).view(torch.uint8), 0)  # of any dtype
        tensors[name].detach().copy_(room)


def _spread(target: DTensor, whole: Tensor, tag: int, pending: _Pending) -> None:
    """Send each rank its part of `whole`, or receive this rank's part."""
    rank, mesh, local = dist.get_rank(), target.device_mesh, target.to_local()
    for coordinate in product(*map(range, mesh.shape)):
        region = find_region(target.shape, mesh.shape, find_cuts(target), coordinate)
        receiver = int(mesh.mesh[coordinate])
        if not count_elements(region) or rank not in (0, receiver):
            continue
        if receiver == 0:
            local.copy_(whole[make_slices(region)])
        elif rank == 0:
            part = whole[make_slices(region)].to(mesh.device_type, target.dtype)
            pending.add(dist.isend, part.contiguous(), receiver, tag)
        else:
            room = torch.empty(local.shape, dtype=target.dtype, device=mesh.device_type)
            pending.add(dist.irecv, room, 0, tag)
            pending.copies.append((local, room))
