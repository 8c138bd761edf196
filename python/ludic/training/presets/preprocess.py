"""What presets do to a batch before it is trained."""

from __future__ import annotations

from ludic.training.algorithm import (
    PreprocessFn,
    compose_preprocess,
    drop_zero_weight_samples,
    filter_zero_variance_groups,
    validate_actor_logps,
)
from ludic.training.types import SAWBatch


def filter_flat_groups(eps: float) -> PreprocessFn:
    """Leave out the groups whose weights do not vary (`filter_zero_variance_groups`)."""

    def filter_groups(batch: SAWBatch) -> SAWBatch:
        return filter_zero_variance_groups(batch, eps=eps)

    return filter_groups


def drop_zero_weights(drop: bool, eps: float) -> PreprocessFn | None:
    """`drop_zero_weight_samples` where that is asked for."""
    if not drop:
        return None

    def drop_samples(batch: SAWBatch) -> SAWBatch:
        return drop_zero_weight_samples(batch, eps=eps)

    return drop_samples


def check_ratios(drop: bool, eps: float) -> PreprocessFn:
    """Check that there are log-probabilities to take ratios of. Samples that are dropped anyway
    need none."""
    dropping = drop_zero_weights(drop, eps)
    return validate_actor_logps if dropping is None else compose_preprocess(dropping, validate_actor_logps)
