"""What bounds the reading of Python lists: our reader, which calls the stable C API for each
number, beside CPython's own loop, which reads the memory of the list and of its numbers directly.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from benches.python.contest import Contender, Contest
from benches.python.samples import list_items

from ludic import _core


def contests(samples: int = 1000) -> Iterator[Contest]:
    lists = [item.input_ids for item in list_items(samples)]
    tokens = sum(map(len, lists))
    columns = [np.array(each, np.int32) for each in lists]

    def entry(name: str, read: Callable[[Any], Any], inputs: list[Any] = lists) -> Contender:
        return Contender(name, lambda: [read(each) for each in inputs], cold=True)

    yield Contest(
        f"Reading {samples} lists of ids, {tokens} tokens",
        tokens,
        "id",
        [
            entry("**ludic `read_ids`** to int32", _core.read_ids),
            entry("`array('i', ids)`", lambda ids: array("i", ids)),
            entry("numpy `fromiter`", lambda ids: np.fromiter(ids, np.int32, len(ids))),
            entry("`sum(ids)`: CPython, direct access, nothing written", sum),
            entry("**ludic `read_ids`** of an array", _core.read_ids, columns),
        ],
    )
    yield Contest(
        f"Lengths of {samples} lists",
        samples,
        "list",
        [
            Contender("`list(map(len, lists))`", lambda: list(map(len, lists)), repeats=20),
            Contender("**ludic `lengths_of`**", lambda: _core.lengths_of(lists), repeats=20),
            Contender("`list(lists)`: a list of the same lists", lambda: list(lists), repeats=20),
        ],
    )
