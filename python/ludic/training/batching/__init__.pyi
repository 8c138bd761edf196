from ludic.errors import RequestsExhausted as RequestsExhausted
from ludic.training.batching.offline import (
    OfflineBatchSource as OfflineBatchSource,
    make_chat_template_step_to_item as make_chat_template_step_to_item,
)
from ludic.training.batching.overlapped import OverlappedSource as OverlappedSource
from ludic.training.batching.packing import (
    MicroBatch as MicroBatch,
    collate_micro_batches as collate_micro_batches,
    collate_saw_items as collate_saw_items,
    split_items_by_token_budget as split_items_by_token_budget,
)
from ludic.training.batching.pair_batches import preference_batches as preference_batches
from ludic.training.batching.pipeline import (
    PipelineBatchSource as PipelineBatchSource,
    run_pipeline_actor as run_pipeline_actor,
)
from ludic.training.batching.preference import (
    collate_preference_items as collate_preference_items,
    compute_pair_loss_scale as compute_pair_loss_scale,
    count_pairs_in_items as count_pairs_in_items,
    group_preference_pairs as group_preference_pairs,
    split_preference_pairs_by_token_budget as split_preference_pairs_by_token_budget,
    validate_preference_batch as validate_preference_batch,
)
from ludic.training.batching.shared_batches import SharedBatches as SharedBatches
from ludic.training.batching.source import RolloutBatchSource as RolloutBatchSource
from ludic.training.rollouts.engine import RolloutEngine as RolloutEngine
from ludic.training.rollouts.requests import (
    GRPORequestStrategy as GRPORequestStrategy,
    IdentityStrategy as IdentityStrategy,
    RequestStrategy as RequestStrategy,
    make_dataset_queue_requests_fn as make_dataset_queue_requests_fn,
    make_dataset_sequence_requests_fn as make_dataset_sequence_requests_fn,
    make_requests_fn_from_queue as make_requests_fn_from_queue,
)
