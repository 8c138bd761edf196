"""Counts the memory of torch operations.

Bytes are counted, not sampled: every storage counts from the operation that creates it until it is
freed, so that the numbers are the same on every machine.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """The largest number of bytes in use at one time by storages that were created inside."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {_storage(leaf)._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and _storage(leaf)._cdata not in inputs:
                self._add(_storage(leaf))
        return out

    def _add(self, storage: Any) -> None:
        if storage._cdata in self.sizes:
            return
        self.sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, storage._cdata)

    def _remove(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()
