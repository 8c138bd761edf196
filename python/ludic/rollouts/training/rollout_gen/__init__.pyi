from ludic.rollouts.training.rollout_gen.async_rollout_manager import (
    AsyncRolloutManager as AsyncRolloutManager,
    RolloutAborted as RolloutAborted,
    generate_rollout_batch as generate_rollout_batch,
)
from ludic.rollouts.training.rollout_gen.rollout_generation import (
    apply_sample_transforms as apply_sample_transforms,
    build_batch_metadata as build_batch_metadata,
    compute_response_lengths as compute_response_lengths,
    convert_to_batch as convert_to_batch,
    extract_sample_fields as extract_sample_fields,
    generate_rollout_batches as generate_rollout_batches,
)
