"""How the weights are spread over the plain answers of a group, and over its seeded answers."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ludic.training.maxent.listwise import group_sums, spread, weight_entropy


def sum_weight_entropies(weights: ArrayLike, groups: ArrayLike, seed_ids: ArrayLike) -> tuple[float, float, int]:
    """Over the groups with both kinds of answers: the sum of the entropies in nats of the plain
    answers' weights, divided by their sum; the same of the seeded ones; and the number of groups.
    The mean entropy of n answers is at most log n.

    weights: [N], at least 0; groups: [N] numbers; seed_ids: [N], below 1 for a plain answer. A
    group is left out if either kind has no weight.

    Example: weights .1 .1 (plain) and .2 .6 (seeded) have the entropies log 2 = .6931 and, of
    .25 and .75, .5623.
    """
    w, group = np.asarray(weights, dtype=np.float64), np.asarray(groups)
    is_seeded = np.asarray(seed_ids) >= 1
    plain, seeded = (_entropies(w[chosen], group[chosen]) for chosen in (~is_seeded, is_seeded))
    both = plain.keys() & seeded.keys()
    return sum(plain[number] for number in both), sum(seeded[number] for number in both), len(both)


def _entropies(weights: NDArray[np.float64], groups: NDArray[np.int64]) -> dict[int, float]:
    """Group -> the entropy of its weights, of which the sum is not 0."""
    order = np.argsort(groups, kind="stable")
    w, (numbers, first) = weights[order], np.unique(groups[order], return_index=True)
    offsets = np.append(first, len(w)).astype(np.int64)
    totals = group_sums(w, offsets)
    entropy = weight_entropy(w / spread(np.where(totals > 0, totals, 1.0), offsets), offsets)
    return {int(number): float(value) for number, value, total in zip(numbers, entropy, totals, strict=True) if total > 0}
