"""Preference pairs: find them by their metadata, check them, split them into micro-batches, and
collate.

`samples.preference` describes the `meta` of the samples. The two samples of a pair are in the same
micro-batch, as two padded rows: a micro-batch of P pairs computes `2 * longest * P` tokens.

The trainer uses `pair_batches`. The functions of this module are for code with its own training
loop.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ludic import _core
from ludic.errors import DataError, shorten_names
from ludic.training.batching.packing import check_limits, collate_saw_items, token_lengths, truncate_item
from ludic.training.samples.preference import PREFERENCE_KEYS, check_label, meta_value, same_tokens
from ludic.training.types import SAWItem

logger = logging.getLogger(__name__)

PreferencePair = tuple[SAWItem | None, SAWItem | None]
"""(chosen, rejected). One is None only with `require_complete=False`."""


def group_preference_pairs(
    items: Sequence[SAWItem], *, require_complete: bool = True, drop_incomplete: bool = True
) -> list[PreferencePair]:
    """Return (chosen, rejected) for each pair, in order of first appearance.

    An incomplete pair is dropped with a warning, or is an error with `drop_incomplete=False`. With
    `require_complete=False` it is kept, after the complete pairs, with None for the missing sample.
    Raises DataKeyError for a sample without `pair_id` or `role`; DataError for an unknown role, for
    two samples of a pair with the same role, and for an incomplete pair as above.
    """
    pairs, lone = find_pair_rows(items, require_complete=require_complete, drop_incomplete=drop_incomplete)
    complete: list[PreferencePair] = [(items[chosen], items[rejected]) for chosen, rejected in pairs]
    singles = (items[row] for row in lone)
    return complete + [(item, None) if item.meta["role"] == "chosen" else (None, item) for item in singles]


def find_pair_rows(
    items: Sequence[SAWItem], *, require_complete: bool = True, drop_incomplete: bool = True
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`group_preference_pairs` with indices: [P, 2] rows of (chosen, rejected), and [L] rows of the
    samples without a partner that are kept.

    Example: three items with pair ids [a, b, a] and roles [rejected, chosen, chosen] give pairs
    [[2, 0]] and, with `require_complete=False`, lone rows [1].
    """
    ids = [meta_value(item, row, "pair_id") for row, item in enumerate(items)]
    roles = [meta_value(item, row, "role") for row, item in enumerate(items)]
    pairs, incomplete = _core.group_pairs(ids, roles, drop_incomplete or not require_complete)
    if not incomplete:
        return pairs, np.zeros(0, dtype=np.int64)
    if not require_complete:
        return pairs, np.setdiff1d(np.arange(len(items)), pairs)
    logger.warning("dropped %d incomplete preference pairs: %s", len(incomplete), shorten_names(incomplete))
    return pairs, np.zeros(0, dtype=np.int64)


def split_preference_pairs_by_token_budget(
    pairs: Sequence[PreferencePair], *, micro_token_budget: int, max_seq_len: int
) -> list[list[SAWItem]]:
    """Split pairs greedily into micro-batches of whole pairs, chosen and rejected in neighbouring
    rows.

    Samples are cut to `max_seq_len`, and pairs are sorted by the length of their longer sample
    (stable). A new micro-batch starts when `2 * longest * pairs` would exceed the budget. Example:
    pairs of lengths (1, 3), (2, 2), (1, 1) and a budget of 8 give [(1, 1), (2, 2)] with
    2*2*2 = 8 tokens, and [(1, 3)] with 2*3*1 = 6.

    Pairs whose two samples become equal by the cut are dropped with a warning. A sample without a
    partner counts as one row, in a micro-batch without pairs. Raises BudgetError if the longest
    pair alone exceeds the budget.
    """
    check_limits(micro_token_budget, max_seq_len)
    full = [[item for item in pair if item is not None] for pair in pairs]
    cut = [[truncate_item(item, max_seq_len) for item in pair] for pair in full]
    complete = [(after, before) for after, before in zip(cut, full, strict=True) if len(after) == 2]
    distinct = [after for after, before in complete if same_tokens(*before) or not same_tokens(*after)]
    if len(distinct) < len(complete):
        logger.warning(
            "dropped %d preference pairs whose samples are equal within max_seq_len (%d)",
            len(complete) - len(distinct),
            max_seq_len,
        )
    paired = [item for pair in distinct for item in pair]
    lone = [pair[0] for pair in cut if len(pair) == 1]
    rows = np.arange(len(paired), dtype=np.int64).reshape(-1, 2)  # chosen, rejected: [[0, 1], [2, 3], ...]
    plan = _core.plan_pairs(token_lengths(paired), rows, micro_token_budget)
    return plan.split(paired) + _core.plan_greedy(token_lengths(lone), micro_token_budget).split(lone)


def collate_preference_items(
    items: Sequence[SAWItem],
    *,
    pad_token_id: int,
    device: torch.device | str,
    meta_keys: Sequence[str] = PREFERENCE_KEYS,
) -> dict[str, Any]:
    """Return the tensors of `collate_saw_items`, and `meta`: for each key the list of the items'
    values. Raises DataKeyError if an item lacks a key."""
    meta = collate_meta(items, meta_keys)
    return {**collate_saw_items(items, pad_token_id=pad_token_id, device=device), "meta": meta}


def collate_meta(items: Sequence[SAWItem], meta_keys: Sequence[str] = PREFERENCE_KEYS) -> dict[str, list[Any]]:
    """Return for each key the list of the B items' values."""
    return {key: [meta_value(item, row, key) for row, item in enumerate(items)] for key in meta_keys}


def compute_pair_loss_scale(num_pairs_in_micro: float, total_pairs: float) -> float:
    """Return the factor for the mean loss of a micro-batch, with which the sum over
    micro-batches is the mean over all pairs; 0.0 if there are no pairs. Example: 1 of 4 pairs
    gives 0.25."""
    return num_pairs_in_micro / total_pairs if total_pairs > 0 else 0.0


def validate_preference_batch(items: Sequence[SAWItem], *, required_keys: Sequence[str] = PREFERENCE_KEYS) -> None:
    """Check the metadata of preference samples.

    Raises DataKeyError for a missing key; DataError for a role that is neither `chosen` nor
    `rejected`, a label outside [0, 1], and a pair whose samples have different labels. Incomplete
    pairs are no error here; `group_preference_pairs` handles them.
    """
    meta = collate_meta(items, required_keys)
    if "label" in meta:
        for row, label in enumerate(meta["label"]):
            check_label(label, f"sample {row}")
    if {"pair_id", "role"} <= meta.keys():
        pairs, _ = _core.group_pairs(meta["pair_id"], meta["role"])
        for chosen, rejected in pairs if "label" in meta else ():
            label, other = meta["label"][chosen], meta["label"][rejected]
            if label != other:
                raise DataError(f"pair {meta['pair_id'][chosen]!r} has the labels {label} and {other}; they must be equal")


def count_pairs_in_items(items: Sequence[SAWItem]) -> int:
    """Number of complete pairs."""
    meta = collate_meta(items, ("pair_id", "role"))
    return len(_core.group_pairs(meta["pair_id"], meta["role"])[0])
