"""Combines the statistics of parts (micro-batches, ranks) into statistics of the whole. The result
does not depend on the split.

A mean is weighted by what it is a mean over: action tokens for `TOKEN_KEYS` if the part has
`avg_action_tokens`, pairs for `PAIR_MEAN_KEYS` if it has `num_pairs`, else samples. A standard
deviation `x_std` next to `x_mean` is over all values: the variance is the mean of the parts'
variances plus the variance of their means. `gpu_*` is a maximum, counts are sums. A key of a
composite loss, `term/key`, follows the rule of `key`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ludic.training import ranks
from ludic.training.loss.mismatch import LARGEST, PREFIX, compute_mismatch, is_mismatch_sum
from ludic.training.loss.reference_kl import compute_reference, is_reference_sum

COUNT_KEYS = frozenset({"num_samples", "target_rollouts", "effective_rollouts", "total_completion_tokens", "num_pairs"})
PAIR_MEAN_KEYS = frozenset({"accuracy", "chosen_score", "rejected_score", "margin", "score_reg"})
"""Means over the pairs of a micro-batch, if it has `num_pairs`: samples without a partner do not
count."""
TOKEN_KEYS = frozenset(
    {
        *("ratio_mean", "ratio_std", "kl_actor_policy", "clip_frac", "ratio_clip_frac"),
        *("grad_weight_mean", "grad_weight_std", "nll_mean", "entropy_mean"),
    }
)
"""Means over the action tokens of a micro-batch, if it has `avg_action_tokens`. A loss on whole
sequences does not report it, and its means are over samples."""

Rule = Literal["mean", "std", "sum", "max", "min"]


@dataclass(frozen=True)
class Stat:
    """A statistic of some samples, and the rule that combines it with the statistic of other
    samples.

    >>> combine_stats([Stat(1.0, weight=3.0), Stat(5.0, weight=1.0)])
    Stat(value=2.0, weight=4.0, rule='mean', mean=0.0)
    """

    value: float
    weight: float = 1.0
    """How many samples, tokens, pairs or rollouts a `mean` or `std` is over; 0: nothing was
    measured."""
    rule: Rule = "mean"
    mean: float = 0.0
    """The mean of the values that a `std` is over."""


def combine_stats(parts: Sequence[Stat]) -> Stat:
    """The statistic of all samples, from the statistics of one or more parts."""
    rule = parts[0].rule
    values = [part.value for part in parts]
    if rule == "sum":
        return Stat(math.fsum(values), rule=rule)
    if rule in ("max", "min"):
        return Stat(max(values) if rule == "max" else min(values), rule=rule)
    measured = [part for part in parts if part.weight > 0]
    weight = math.fsum(part.weight for part in measured)
    if not weight:
        return Stat(0.0, 0.0, rule)
    if rule == "mean":
        return Stat(math.fsum(part.weight * part.value for part in measured) / weight, weight)
    mean = math.fsum(part.weight * part.mean for part in measured) / weight
    variance = math.fsum(part.weight * (part.value**2 + (part.mean - mean) ** 2) for part in measured) / weight
    return Stat(math.sqrt(variance), weight, "std", mean)


def combine_micro_stats(micro_stats: Sequence[Mapping[str, float]], sizes: Sequence[float]) -> dict[str, Stat]:
    """One statistic per key, of all micro-batches that have it. `sizes`: samples of each."""
    columns: dict[str, list[Stat]] = {}
    for stats, size in zip(micro_stats, sizes, strict=True):
        for key, value in stats.items():
            columns.setdefault(key, []).append(_make_stat(key, value, stats, float(size)))
    return {key: combine_stats(parts) for key, parts in columns.items()}


def _make_stat(key: str, value: float, stats: Mapping[str, float], size: float) -> Stat:
    if is_mismatch_sum(key):
        return Stat(value, rule="max" if key == f"{PREFIX}{LARGEST}" else "sum")
    if is_reference_sum(key):
        return Stat(value, rule="sum")
    if key.startswith("gpu_"):
        return Stat(value, rule="max")
    term, slash, name = key.rpartition("/")
    if name in COUNT_KEYS:
        return Stat(value, rule="sum")
    tokens, pairs = stats.get(f"{term}{slash}avg_action_tokens"), stats.get(f"{term}{slash}num_pairs")
    weight = size
    if name in PAIR_MEAN_KEYS and pairs is not None:
        weight = pairs
    elif name in TOKEN_KEYS and tokens is not None:
        weight = tokens * size
    mean = stats.get(f"{key.removesuffix('_std')}_mean") if name.endswith("_std") else None
    return Stat(value, weight) if mean is None else Stat(value, weight, "std", mean)


def copy_to_host(dictionaries: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """The dictionaries with Python floats. All tensors are copied to the host in one transfer."""
    tensors = [value.detach() for each in dictionaries for value in each.values() if isinstance(value, Tensor)]
    packed: list[float] = []
    if tensors:
        device = next((value.device for value in tensors if value.device.type != "cpu"), torch.device("cpu"))
        packed = torch.stack([value.to(device, torch.float64).reshape(()) for value in tensors]).tolist()
    host = iter(packed)
    return [
        {key: next(host) if isinstance(value, Tensor) else float(value) for key, value in each.items()} for each in dictionaries
    ]


def final_values(stats: Mapping[str, Stat]) -> dict[str, float]:
    """The measured values; the sums of `loss.mismatch` and `loss.reference_kl` become their
    statistics."""
    sums = {key: stat.value for key, stat in stats.items() if is_mismatch_sum(key) or is_reference_sum(key)}
    plain = {key: stat.value for key, stat in stats.items() if key not in sums and stat.weight > 0}
    return {**plain, **compute_mismatch(sums), **compute_reference(sums)}


def reduce_over_ranks(stats: Mapping[str, Stat], device: torch.device | str) -> dict[str, Stat]:
    """The statistics of all ranks together, as if one rank had all samples. A rank may lack
    keys."""
    if not ranks.is_distributed():
        return dict(stats)
    names = ranks.union_over_ranks([f"{stat.rule} {key}" for key, stat in stats.items()], device)
    keys: list[tuple[Rule, str]] = [_rule_and_key(name) for name in names]
    sums = iter(ranks.sum_over_ranks(list(_moments(keys, stats)), device))
    signs = {"max": 1.0, "min": -1.0}
    extremes = [signs[rule] * stats[key].value if key in stats else -math.inf for rule, key in keys if rule in signs]
    largest = iter(ranks.max_over_ranks(extremes, device))
    reduced: dict[str, Stat] = {}
    for rule, key in keys:
        if rule in signs:
            reduced[key] = Stat(signs[rule] * next(largest), rule=rule)
        else:
            reduced[key] = _stat_from_moments(rule, next(sums), next(sums), next(sums))
    return reduced


def _rule_and_key(name: str) -> tuple[Any, str]:
    rule, _, key = name.partition(" ")
    return rule, key


def _moments(keys: Iterable[tuple[Rule, str]], stats: Mapping[str, Stat]) -> Iterable[float]:
    """For each summed key: weight, weighted sum of values, weighted sum of squares."""
    for rule, key in keys:
        if rule in ("max", "min"):
            continue
        stat = stats.get(key)
        if stat is None or not stat.weight:
            yield from (0.0, 0.0, 0.0)
        elif rule == "std":
            yield from (stat.weight, stat.weight * stat.mean, stat.weight * (stat.value**2 + stat.mean**2))
        else:
            weight = 1.0 if rule == "sum" else stat.weight
            yield from (weight, weight * stat.value, 0.0)


def _stat_from_moments(rule: Rule, weight: float, first: float, second: float) -> Stat:
    if rule == "sum" or not weight:
        return Stat(first, 1.0 if rule == "sum" else 0.0, rule)
    mean = first / weight
    if rule == "mean":
        return Stat(mean, weight)
    return Stat(math.sqrt(max(0.0, second / weight - mean**2)), weight, "std", mean)
