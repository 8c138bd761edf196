"""The store at which ranks meet, with text as values and RankError once it is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ludic.errors import RankError

T = TypeVar("T")


class RankStore:
    """A store of `torch.distributed`. `get` is for keys that are there: nothing waits for one."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def has(self, key: str) -> bool:
        return self._call(self._store.check, [key])

    def get(self, key: str) -> str:
        return self._call(self._store.get, key).decode()

    def set(self, key: str, value: str) -> None:
        self._call(self._store.set, key, value)

    def set_first(self, key: str, value: str) -> None:
        """Set a key that no rank has set; the first value stays."""
        self._call(self._store.compare_set, key, "", value)

    def append(self, key: str, value: str) -> None:
        self._call(self._store.append, key, value)

    def count(self, key: str) -> int:
        """Add 1 to a counter, and return the sum over all ranks."""
        return self._call(self._store.add, key, 1)

    def delete(self, key: str) -> None:
        self._call(self._store.delete_key, key)

    @staticmethod
    def _call(operation: Callable[..., T], *arguments: Any) -> T:
        try:
            return operation(*arguments)
        except dist.DistNetworkError as error:
            raise RankError(
                "the store of the ranks is gone: the process that served it has ended, which is rank 0 or torchrun; see its output"
            ) from error
