"""What presets do to a batch before it is trained."""

from __future__ import annotations

from functools import partial

from ludic.training.algorithm import (
    PreprocessFn,
    compose_preprocess,
    drop_zero_weight_samples,
    filter_zero_variance_groups,
    validate_actor_logps,
)


def drop_zero_weights(drop: bool, eps: float) -> PreprocessFn | None:
    """`drop_zero_weight_samples`, or None without `drop`."""
    return partial(drop_zero_weight_samples, eps=eps) if drop else None


def check_ratios(drop: bool, eps: float, *, flat_groups_eps: float | None = None) -> PreprocessFn:
    """Check that every sample has the log-probabilities that ratios need.

    Before the check, groups whose weights vary by at most `flat_groups_eps` are dropped, if that is
    given, then samples with |weight| <= `eps`, if `drop`: what is dropped needs none.
    """
    filter_groups = None if flat_groups_eps is None else partial(filter_zero_variance_groups, eps=flat_groups_eps)
    steps = [step for step in (filter_groups, drop_zero_weights(drop, eps)) if step is not None]
    return compose_preprocess(*steps, validate_actor_logps) if steps else validate_actor_logps
