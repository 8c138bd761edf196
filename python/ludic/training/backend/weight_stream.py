"""The weights of a sharded model, gathered on rank 0 a bucket at a time while they are published.

rank 0         reads: bucket 0, bucket 1, ..; a bucket is dropped when the next one is requested
other ranks    send their parts of the bucket that rank 0 asks for, until it needs no more
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ludic.models import shard_transfer
from ludic.models.regions import split_in_buckets
from ludic.models.shard_transfer import SharedTensor, make_buffers, transfer
from ludic.training import ranks

DOING = "publishing weights"


class WeightStream:
    """(name, whole tensor) on rank 0, sorted by name. It can be iterated several times; each time
    the weights are gathered again.

    >>> stream = backend.stream_weights()
    >>> with stream.shared():             # on all ranks
    ...     if ranks.rank() == 0:
    ...         publisher.publish_stream(stream, version=17)

    Rank 0 has one bucket in memory (`shard_transfer.BUCKET_BYTES` and less than one tensor more),
    the others nothing but their parts.
    """

    def __init__(self, tensors: Mapping[str, SharedTensor], device: torch.device | str | None = None) -> None:
        """`device`: where rank 0 gets the tensors. None means where they arrive."""
        self._tensors = {name: tensors[name] for name in sorted(tensors)}
        self._buckets = split_in_buckets(
            {name: tensor.size for name, tensor in self._tensors.items()}, shard_transfer.BUCKET_BYTES
        )
        self._owners = dict.fromkeys(self._tensors, 0)
        self._device = device
        self._cuda_device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._failed = False

    def describe(self) -> dict[str, Tensor]:
        """Name -> an empty tensor on the device `meta` of the same shape and dtype."""
        return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in self._tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._cuda_device is not None:
            torch.cuda.set_device(self._cuda_device)  # of this thread, in which a publisher may run
        for number in range(len(self._buckets)):
            arrived = self._gather(number)
            for name in list(arrived):
                tensor = arrived.pop(name)
                yield name, tensor if self._device is None else tensor.to(self._device)

    def _gather(self, number: int) -> dict[str, Tensor]:
        bucket = {name: self._tensors[name] for name in self._buckets[number]}
        buffers: dict[str, Tensor] = {}

        def begin() -> int:
            buffers.update(make_buffers(bucket, self._owners))
            return number

        self._tell(begin)
        transfer(bucket, self._owners, buffers)
        return buffers

    def _tell(self, command: Callable[[], int | None]) -> None:
        """Tell the other ranks what `command` returns: the number of a bucket, or None at the
        end."""
        try:
            ranks.ask_rank_0(DOING, command)
        except Exception:
            self._failed = True  # the others know, and wait for nothing more
            raise

    @contextmanager
    def shared(self) -> Iterator[None]:
        """In the block, rank 0 may iterate. The other ranks serve it until its block ends; an error
        there is raised on all."""
        if ranks.rank() != 0:
            while (number := ranks.ask_rank_0(DOING, _ask_for_nothing)) is not None:
                transfer({name: self._tensors[name] for name in self._buckets[number]}, self._owners, {})
            yield
            return
        try:
            yield
        except Exception as error:
            if not self._failed:
                self._end(error)
            raise
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        def end() -> None:
            if error is not None:
                raise error

        self._tell(end)


def _ask_for_nothing() -> int | None:
    """The question of ranks other than 0, which is never asked."""
    return None
