"""Keeps the results of programs that were judged before."""

from __future__ import annotations

import threading
from collections import OrderedDict

from ludic.envs.code_exec.types import BatchTestResult
from ludic.errors import ConfigError


class LRUCache:
    """The `max_size` results that were used last, by the hashes of code and tests. For any number
    of threads."""

    def __init__(self, max_size: int = 10_000) -> None:
        if max_size < 1:
            raise ConfigError(f"max_size ({max_size}) must be >= 1")
        self._max_size = max_size
        self._results: OrderedDict[tuple[str, str], BatchTestResult] = OrderedDict()
        self._lock = threading.Lock()
        self._hits = self._misses = 0

    def get(self, code_hash: str, tests_hash: str) -> BatchTestResult | None:
        with self._lock:
            result = self._results.get((code_hash, tests_hash))
            if result is None:
                self._misses += 1
                return None
            self._hits += 1
            self._results.move_to_end((code_hash, tests_hash))
            return result

    def put(self, code_hash: str, tests_hash: str, result: BatchTestResult) -> None:
        with self._lock:
            self._results[code_hash, tests_hash] = result
            self._results.move_to_end((code_hash, tests_hash))
            if len(self._results) > self._max_size:
                self._results.popitem(last=False)

    def clear(self) -> None:
        """Forget all results; the counts stay."""
        with self._lock:
            self._results.clear()

    @property
    def stats(self) -> dict[str, int]:
        """`hits`, `misses`, `size` and `max_size`."""
        with self._lock:
            return {"hits": self._hits, "misses": self._misses, "size": len(self._results), "max_size": self._max_size}

    @property
    def hit_rate(self) -> float:
        """Hits / calls of `get`; 0 before the first."""
        with self._lock:
            calls = self._hits + self._misses
            return self._hits / calls if calls else 0.0
