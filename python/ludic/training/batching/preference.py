"""Preference pairs as samples: found by their metadata, checked, split into micro-batches and
collated.

Each sample says in its `meta` which pair it belongs to (`pair_id`, a text or a whole number),
whether it is the `chosen` or the `rejected` one (`role`), and `label`, the probability that the
chosen one is the better: 1.0 where it was preferred. A pair goes through the model together: two
rows as long as the longer sample, so that a micro-batch of P pairs costs `2 * longest * P` tokens.

`pair_batches` is what the trainer runs; these functions are the parts, and the whole for code that
has a loop of its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ludic import _core
from ludic.errors import DataError, DataKeyError
from ludic.training.batching.micro_batching import check_limits, collate_saw_items, truncate_item
from ludic.training.types import SAWItem

logger = logging.getLogger(__name__)

PREFERENCE_KEYS = ("pair_id", "role", "label")
"""What every preference sample has in its `meta`."""
PreferencePair = tuple[SAWItem | None, SAWItem | None]
"""(chosen, rejected). One of them is None only where incomplete pairs were asked for."""


def group_preference_pairs(
    items: Sequence[SAWItem], *, require_complete: bool = True, drop_incomplete: bool = True
) -> list[PreferencePair]:
    """(chosen, rejected) of each pair, in order of first appearance.

    A pair with one sample only is dropped with a warning, or refused if not `drop_incomplete`.
    Without `require_complete` it is kept, after the complete ones, with None for the other sample.
    Raises DataKeyError for a sample without `pair_id` or `role`, DataError for another role than
    the two, for two samples of one role, and for a pair that is refused.
    """
    pairs, lone = pairs_of(items, require_complete=require_complete, drop_incomplete=drop_incomplete)
    complete: list[PreferencePair] = [(items[chosen], items[rejected]) for chosen, rejected in pairs]
    singles = (items[row] for row in lone)
    return complete + [(item, None) if item.meta["role"] == "chosen" else (None, item) for item in singles]


def pairs_of(
    items: Sequence[SAWItem], *, require_complete: bool = True, drop_incomplete: bool = True
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`group_preference_pairs` on rows: [P, 2] rows of (chosen, rejected), and the rows that are
    alone and kept."""
    ids = [meta_value(item, row, "pair_id") for row, item in enumerate(items)]
    roles = [meta_value(item, row, "role") for row, item in enumerate(items)]
    pairs, incomplete = _core.group_pairs(ids, roles, drop_incomplete or not require_complete)
    if not incomplete:
        return pairs, np.zeros(0, dtype=np.int64)
    if not require_complete:
        return pairs, np.setdiff1d(np.arange(len(items)), pairs)
    logger.warning("dropped %d incomplete preference pairs: %s", len(incomplete), shortened(incomplete))
    return pairs, np.zeros(0, dtype=np.int64)


def split_preference_pairs_by_token_budget(
    pairs: Sequence[PreferencePair], *, micro_token_budget: int, max_seq_len: int
) -> list[list[SAWItem]]:
    """Greedy micro-batches of whole pairs: cut to `max_seq_len`, sorted by the longer sample
    (stable), a new one opened when `2 * longest * pairs` would exceed the budget. Chosen and
    rejected are neighbours.

    Pairs that the cut makes equal are dropped with a warning. A sample without its other half
    counts as one row; such samples are in micro-batches of their own. Raises BudgetError where the
    longest pair alone exceeds the budget.
    """
    check_limits(micro_token_budget, max_seq_len)
    given = [[item for item in pair if item is not None] for pair in pairs]
    cut = [[truncate_item(item, max_seq_len) for item in pair] for pair in given]
    whole = [pair for pair in cut if len(pair) == 2]
    told_apart = [pair for pair, before in zip(cut, given, strict=True) if len(pair) == 2 and not _cut_made_equal(pair, before)]
    if len(told_apart) < len(whole):
        logger.warning(
            "dropped %d preference pairs whose samples are equal within max_seq_len (%d)",
            len(whole) - len(told_apart),
            max_seq_len,
        )
    halves = [item for pair in told_apart for item in pair]
    lone = [pair[0] for pair in cut if len(pair) == 1]
    rows = np.arange(len(halves), dtype=np.int64).reshape(-1, 2)
    plan = _core.plan_pairs(_lengths(halves), rows, micro_token_budget)
    return plan.split(halves) + _core.plan_greedy(_lengths(lone), micro_token_budget).split(lone)


def collate_preference_items(
    items: Sequence[SAWItem],
    *,
    pad_token_id: int,
    device: torch.device | str,
    meta_keys: Sequence[str] = PREFERENCE_KEYS,
) -> dict[str, Any]:
    """`collate_saw_items`, and `meta`: for each of the keys the list of the items' values.
    DataKeyError where an item lacks one."""
    meta = collate_meta(items, meta_keys)
    return {**collate_saw_items(items, pad_token_id=pad_token_id, device=device), "meta": meta}


def collate_meta(items: Sequence[SAWItem], meta_keys: Sequence[str] = PREFERENCE_KEYS) -> dict[str, list[Any]]:
    """[B] values of each key."""
    return {key: [meta_value(item, row, key) for row, item in enumerate(items)] for key in meta_keys}


def compute_pair_loss_scale(num_pairs_in_micro: float, total_pairs: float) -> float:
    """The share of a micro-batch's mean loss in that of all pairs; 0.0 where there are none."""
    return num_pairs_in_micro / total_pairs if total_pairs > 0 else 0.0


def validate_preference_batch(items: Sequence[SAWItem], *, required_keys: Sequence[str] = PREFERENCE_KEYS) -> None:
    """Raise DataKeyError for a sample that lacks a key, DataError for roles that are no pair's,
    labels outside [0, 1], and pairs whose samples disagree on it. Whether incomplete pairs are
    an error is `group_preference_pairs`' to say."""
    meta = collate_meta(items, required_keys)
    if "label" in meta:
        for row, label in enumerate(meta["label"]):
            check_label(label, f"sample {row}")
    if {"pair_id", "role"} <= meta.keys():
        pairs, _ = _core.group_pairs(meta["pair_id"], meta["role"])
        for chosen, rejected in pairs if "label" in meta else ():
            if meta["label"][chosen] != meta["label"][rejected]:
                raise DataError(
                    f"pair {meta['pair_id'][chosen]!r} has the labels {meta['label'][chosen]} and {meta['label'][rejected]}; its two "
                    "samples must have one label"
                )


def count_pairs_in_items(items: Sequence[SAWItem]) -> int:
    """Complete pairs."""
    meta = collate_meta(items, ("pair_id", "role"))
    return len(_core.group_pairs(meta["pair_id"], meta["role"])[0])


def check_label(label: Any, where: str) -> float:
    """The label as a float."""
    number = isinstance(label, int | float | np.integer | np.floating)
    if not number or not math.isfinite(label) or not 0 <= label <= 1:
        raise DataError(
            f"the label of {where} ({label!r}) must be in [0, 1]: the probability that the chosen response is the better"
        )
    return float(label)


def meta_value(item: SAWItem, row: int, key: str) -> Any:
    """`item.meta[key]`; DataKeyError where there is none."""
    if key not in item.meta:
        raise DataKeyError(
            f"sample {row} has no {key!r} in its meta, which has {', '.join(map(str, item.meta)) or 'nothing'}; make preference samples "
            "with create_preference_saw_items"
        )
    return item.meta[key]


def _cut_made_equal(pair: Sequence[SAWItem], before: Sequence[SAWItem]) -> bool:
    return same_tokens(*pair) and not same_tokens(*before)


def same_tokens(one: SAWItem, other: SAWItem) -> bool:
    """Whether two samples have the same ids."""
    return len(one.input_ids) == len(other.input_ids) and bool(np.array_equal(one.input_ids, other.input_ids))


def shortened(names: Sequence[object], most: int = 8) -> str:
    """The first of them, for a message."""
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _lengths(items: Sequence[SAWItem]) -> NDArray[np.int32]:
    return np.fromiter((len(item.input_ids) for item in items), dtype=np.int32, count=len(items))
