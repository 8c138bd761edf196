"""Keeps the results of programs that were judged before."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ludic.envs.code_exec.types import BatchTestResult, TestCase
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


class HashedTests(list[TestCase]):
    """Tests whose hash is known: a runner that is given these does not compute one."""

    def __init__(self, tests: Iterable[TestCase], tests_hash: str) -> None:
        super().__init__(tests)
        self.tests_hash = tests_hash


def compute_hash(content: str) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the text."""
    return hashlib.sha256(content.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


def hash_tests(tests: Sequence[TestCase]) -> str:
    """The hash of inputs and expected outputs in their order; ids do not count. Of `HashedTests`
    the one that they have."""
    if isinstance(tests, HashedTests):
        return tests.tests_hash
    return compute_hash(json.dumps([(test.input, test.expected) for test in tests], sort_keys=True, default=str))


def hash_calls(tests: Sequence[TestCase]) -> str:
    """As `hash_tests`, for expected values of which a list and a tuple differ."""
    if isinstance(tests, HashedTests):
        return tests.tests_hash
    return compute_hash(repr([(test.input, test.expected) for test in tests]))
