"""The metadata of preference samples, and checks of it.

`pair_id` (text or a whole number) identifies the pair, `role` is `chosen` or `rejected`, and
`label` is the probability that the chosen response is better: 1.0 for a plain preference.

    {"pair_id": "sum", "role": "chosen", "label": 1.0}
    {"pair_id": "sum", "role": "rejected", "label": 1.0}
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ludic.errors import DataError, DataKeyError
from ludic.training.types import SAWItem

PREFERENCE_KEYS = ("pair_id", "role", "label")
"""The keys that every preference sample has in its `meta`."""


def check_label(label: Any, where: str) -> float:
    """Return the label as a float. Raises DataError, naming `where`, unless it is a number in
    [0, 1]."""
    is_number = isinstance(label, int | float | np.integer | np.floating)
    if not is_number or not math.isfinite(label) or not 0 <= label <= 1:
        raise DataError(f"the label of {where} ({label!r}) must be in [0, 1]: the probability that the chosen response is better")
    return float(label)


def meta_value(item: SAWItem, row: int, key: str) -> Any:
    """Return `item.meta[key]`. Raises DataKeyError, naming sample `row`, if the key is missing."""
    if key not in item.meta:
        raise DataKeyError(
            f"sample {row} has no {key!r} in its meta, which has {', '.join(map(str, item.meta)) or 'nothing'}; make preference samples "
            "with create_preference_saw_items"
        )
    return item.meta[key]


def same_tokens(first: SAWItem, second: SAWItem) -> bool:
    """Whether two samples have the same token ids."""
    return len(first.input_ids) == len(second.input_ids) and bool(np.array_equal(first.input_ids, second.input_ids))
