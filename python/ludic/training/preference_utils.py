"""The documented path of `ludic.training.samples.preference`."""

from ludic.training.samples.preference import (
    create_preference_saw_items,
    load_preference_items,
    preference_dataset_to_saw_items,
    shuffle_preference_pairs,
)

__all__ = [
    "create_preference_saw_items",
    "load_preference_items",
    "preference_dataset_to_saw_items",
    "shuffle_preference_pairs",
]
