"""Short names for programs and tests, under which their results are kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from ludic.envs.code_exec.types import TestCase


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
