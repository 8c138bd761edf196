"""Another name of `ludic.training.batching.preference`."""

from ludic.training.batching.preference import (
    collate_preference_items,
    compute_pair_loss_scale,
    count_pairs_in_items,
    group_preference_pairs,
    split_preference_pairs_by_token_budget,
    validate_preference_batch,
)

__all__ = [
    "collate_preference_items",
    "compute_pair_loss_scale",
    "count_pairs_in_items",
    "group_preference_pairs",
    "split_preference_pairs_by_token_budget",
    "validate_preference_batch",
]
