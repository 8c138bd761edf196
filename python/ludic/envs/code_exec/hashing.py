"""Short names for programs and tests, under which their results are kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from ludic.envs.code_exec.types import TestCase


def compute_hash(content: str) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the text."""
    return hashlib.sha256(content.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


def hash_tests(tests: Sequence[TestCase]) -> str:
    """The hash of inputs and expected outputs in their order; ids do not count."""
    return compute_hash(json.dumps([(test.input, test.expected) for test in tests], sort_keys=True, default=str))
