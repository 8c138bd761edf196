"""From requests to micro-batches. Every name is imported when it is first asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "intra_batch_control": (
        "GRPORequestStrategy",
        "IdentityStrategy",
        "RequestStrategy",
    ),
    "micro_batching": (
        "MicroBatch",
        "collate_micro_batches",
        "collate_saw_items",
        "split_items_by_token_budget",
    ),
    "offline": ("OfflineBatchSource", "make_chat_template_step_to_item"),
    "overlapped": ("OverlappedSource",),
    "pair_batches": ("preference_batches",),
    "preference": (
        "collate_preference_items",
        "compute_pair_loss_scale",
        "count_pairs_in_items",
        "group_preference_pairs",
        "split_preference_pairs_by_token_budget",
        "validate_preference_batch",
    ),
    "requests_from_dataset": (
        "RequestsExhausted",
        "make_dataset_queue_requests_fn",
        "make_dataset_sequence_requests_fn",
        "make_requests_fn_from_queue",
    ),
    "rollout_engine": ("RolloutEngine",),
    "synced_batching": ("RolloutBatchSource",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from ludic.training.batching.intra_batch_control import (
        GRPORequestStrategy as GRPORequestStrategy,
        IdentityStrategy as IdentityStrategy,
        RequestStrategy as RequestStrategy,
    )
    from ludic.training.batching.micro_batching import (
        MicroBatch as MicroBatch,
        collate_micro_batches as collate_micro_batches,
        collate_saw_items as collate_saw_items,
        split_items_by_token_budget as split_items_by_token_budget,
    )
    from ludic.training.batching.offline import (
        OfflineBatchSource as OfflineBatchSource,
        make_chat_template_step_to_item as make_chat_template_step_to_item,
    )
    from ludic.training.batching.overlapped import OverlappedSource as OverlappedSource
    from ludic.training.batching.pair_batches import preference_batches as preference_batches
    from ludic.training.batching.preference import (
        collate_preference_items as collate_preference_items,
        compute_pair_loss_scale as compute_pair_loss_scale,
        count_pairs_in_items as count_pairs_in_items,
        group_preference_pairs as group_preference_pairs,
        split_preference_pairs_by_token_budget as split_preference_pairs_by_token_budget,
        validate_preference_batch as validate_preference_batch,
    )
    from ludic.training.batching.requests_from_dataset import (
        RequestsExhausted as RequestsExhausted,
        make_dataset_queue_requests_fn as make_dataset_queue_requests_fn,
        make_dataset_sequence_requests_fn as make_dataset_sequence_requests_fn,
        make_requests_fn_from_queue as make_requests_fn_from_queue,
    )
    from ludic.training.batching.rollout_engine import RolloutEngine as RolloutEngine
    from ludic.training.batching.synced_batching import RolloutBatchSource as RolloutBatchSource
