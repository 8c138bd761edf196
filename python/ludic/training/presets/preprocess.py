"""The preprocessing of batches in presets."""

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
    """Return `drop_zero_weight_samples` with this `eps`; None if `drop` is False."""
    return partial(drop_zero_weight_samples, eps=eps) if drop else None


def check_ratios(drop: bool, eps: float, *, flat_groups_eps: float | None = None) -> PreprocessFn:
    """Return a function that checks that every sample has the sampled log-probabilities that ratios
    need.

    Before the check it drops, if `flat_groups_eps` is set, the groups in which the standard
    deviation of the weights is at most that, and then, if `drop` is True, the samples with
    |weight| <= `eps`: dropped samples need no log-probabilities.
    """
    filter_groups = None if flat_groups_eps is None else partial(filter_zero_variance_groups, eps=flat_groups_eps)
    steps = [step for step in (filter_groups, drop_zero_weights(drop, eps)) if step is not None]
    return compose_preprocess(*steps, validate_actor_logps) if steps else validate_actor_logps
