"""Several batches as one: their samples one after another, and the facts about all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ludic.training.types import SAWBatch

_ADDED = ("target_rollouts", "played_rollouts", "batch_size", "seed/without_plain")
"""Counts, beside all whose names begin with `num_`."""
_LARGEST = ("generation_s", "queue/", "actors/", "groups/")
_MEAN_REWARD, _DEVIATION = "avg_total_reward", "reward_std"
_OF_ROLLOUTS = (_MEAN_REWARD, "zvp_filter_frac", "frac_reward_zero_std")
"""Means over rollouts."""
_OF_SAMPLES = ("avg_completion_length", "avg_prompt_length")
"""Means over samples."""


def join_batches(batches: Sequence[SAWBatch]) -> SAWBatch:
    """The samples of `batches`, in their order. In the meta, counts are added up; means, and the
    deviation of the reward, are those of all samples or rollouts and are left out if a batch with
    such lacks them; of times and of numbers of a queue the largest is taken, of anything else the
    first.

    Example: 3 rollouts with a mean reward of 1.0 and 1 with 0.0 have a mean of 0.75.
    """
    items = [item for batch in batches for item in batch.items]
    keys = dict.fromkeys(key for batch in batches for key in batch.meta)
    meta = {key: value for key in keys if (value := _join(key, batches)) is not None}
    return SAWBatch(items, meta)


def _join(key: str, batches: Sequence[SAWBatch]) -> Any:
    """The value of the joined batch; None if it has none."""
    values = [batch.meta[key] for batch in batches if key in batch.meta]
    if key in _ADDED or key.startswith("num_"):
        return sum(values)
    if key.startswith(_LARGEST):
        return max(values)
    if key in (*_OF_ROLLOUTS, *_OF_SAMPLES, _DEVIATION):
        filled = [batch for batch in batches if _weight(key, batch)]  # rollouts may have made no sample
        if not all(key in batch.meta for batch in filled):
            return None
        if key == _DEVIATION:
            return _join_deviation(filled)
        return _mean([batch.meta[key] for batch in filled], [_weight(key, batch) for batch in filled])
    return values[0]


def _weight(key: str, batch: SAWBatch) -> float:
    """How many values the mean `key` is over."""
    if key in _OF_SAMPLES:
        return float(len(batch.items))
    return float(batch.meta.get("played_rollouts", batch.meta.get("target_rollouts", len(batch.items))))


def _join_deviation(batches: Sequence[SAWBatch]) -> float | None:
    """The population standard deviation of the rewards of all rollouts.

    Example: rewards [1, 1, 1] and [0] have deviations 0 and 0 and means 1 and 0. All have the mean
    0.75 and the deviation sqrt((3 * 0.25**2 + 0.75**2) / 4) = 0.433.
    """
    if not all(_MEAN_REWARD in batch.meta for batch in batches):
        return None
    weights = [_weight(_DEVIATION, batch) for batch in batches]
    means = [batch.meta[_MEAN_REWARD] for batch in batches]
    mean = _mean(means, weights)
    squares = [batch.meta[_DEVIATION] ** 2 + (own - mean) ** 2 for batch, own in zip(batches, means, strict=True)]
    return math.sqrt(_mean(squares, weights))


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = math.fsum(weights)
    return math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / total if total else 0.0
