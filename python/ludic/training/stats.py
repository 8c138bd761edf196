"""Statistics of a step from its samples and rollouts: counts, mean rewards and lengths.
docs/metrics.md explains each key.

Statistics of parts (micro-batches, ranks) are combined into statistics of the whole. The result
does not depend on the split. A mean is weighted by what it is a mean over: action tokens for
`TOKEN_KEYS` if the part has `avg_action_tokens`, pairs for `PAIR_MEAN_KEYS` if it has `num_pairs`,
N samples for `x` if it has `num_x` = N (KTO's `rewards/chosen`), else samples. A standard deviation
`x_std` next to `x_mean` is over all values: the variance is the mean of the parts' variances plus
the variance of their means. `gpu_*` is a maximum, counts are sums. A key of a composite loss,
`term/key`, follows the rule of `key`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ludic.columns import mean_or_zero
from ludic.errors import ConfigError, DataError
from ludic.training import ranks
from ludic.training.loss.statistics import (
    MISMATCH,
    MISMATCH_MAX,
    compute_mismatch,
    compute_reference,
    is_mismatch_sum,
    is_reference_sum,
)
from ludic.training.reducers import (
    Reducer as Reducer,
    apply_reducers,
    apply_reducers_to_records as apply_reducers_to_records,
    check_reducer,
    default_reducers as default_reducers,
)
from ludic.training.rollouts.to_samples import ENVIRONMENTS
from ludic.training.types import SAWBatch, SAWItem
from ludic.types import ENVIRONMENT, stored

logger = logging.getLogger(__name__)

SAMPLED_REWARD = "avg_sampled_reward"
"""Mean total reward of all rollouts of a step, also of rollouts with samples that were filtered or
dropped later."""

RESERVED_KEYS = frozenset(
    {
        *("step", "loss", "reported_loss", "grad_norm", "lr", "optimizer_steps", "loss_scale", "skipped_steps"),
        *("num_samples", "target_rollouts", "played_rollouts", "effective_rollouts"),
        *("avg_total_reward", SAMPLED_REWARD, "reward_std", "frac_reward_zero_std", "entropy"),
        *("avg_completion_length", "min_completion_length", "max_completion_length"),
        *("tau", "beta", "weight_entropy", "weight_entropy_min", "weight_entropy_max", "frac_zero_signal"),
        *("q_entropy_mean", "q_entropy_std", "q_entropy_min", "q_entropy_max"),
        *("advantage_entropy_mean", "advantage_entropy_std"),
        *("seq_len_truncated_empty", "samples_without_actions", "zero_weight_skipped", "zvp_filter_frac", "policy_lag"),
    }
)
"""Keys that the trainer itself logs under `train/`. A reducer cannot have one of these names."""
OWN_PREFIXES = ("guard/", "perf/", "ranks/", "queue/", "actors/", "groups/", "reference/", "critic/", "images/", MISMATCH)
"""Prefixes of keys that are not logged under `train/`, for the trainer itself."""


def check_reducers(reducers: Mapping[str, Reducer]) -> None:
    """Raise ConfigError for a reducer with an invalid setting or with a reserved name."""
    for name, reducer in reducers.items():
        check_reducer(name, reducer)
        key = _add_prefix(name)
        if key.removeprefix("train/") in RESERVED_KEYS or key.startswith(OWN_PREFIXES):
            raise ConfigError(f"a reducer cannot be named {name!r}: the trainer itself logs {key}; choose another name")


def aggregate_stats(
    micro_stats_list: Sequence[Mapping[str, Any]],
    saw_batches: Sequence[SAWBatch],
    *,
    reducers: Mapping[str, Reducer] | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
) -> dict[str, float]:
    """Combine the statistics of micro-batches and batches into statistics of the step; `{}` without
    micro-batches.

    All tensors are copied to the host in one transfer. The module's docstring says how each key is
    combined. A key without any measured value is 0, for example `avg_total_reward` if no sample has
    a reward. The reducers are applied to the samples of the batches. Raises DataError if
    `micro_batch_sizes` and `micro_stats_list` differ in length.
    """
    if not micro_stats_list:
        return {}
    sizes = [1] * len(micro_stats_list) if micro_batch_sizes is None else list(micro_batch_sizes)
    if len(sizes) != len(micro_stats_list):
        raise DataError(f"micro_batch_sizes ({len(sizes)}) and micro_stats_list ({len(micro_stats_list)}) must be equally long")
    stats = {**combine_micro_stats(copy_to_host(micro_stats_list), sizes), **batch_stats(saw_batches)}
    unmeasured = {key: 0.0 for key, stat in stats.items() if not stat.weight}
    items = [item for batch in saw_batches for item in batch.items]
    counts = len(items), int(stats["target_rollouts"].value)
    return {**unmeasured, **final_values(stats), **apply_reducers(items, [item.meta for item in items], reducers or {}, counts)}


def batch_stats(batches: Sequence[SAWBatch]) -> dict[str, Stat]:
    """Return counts of the batches, and the mean reward and length over their samples. The mean
    reward leaves out samples without a reward."""
    items = [item for batch in batches for item in batch.items]
    rewards = [float(item.meta["total_reward"]) for item in items if item.meta.get("total_reward") is not None]
    lengths = [float(_completion_length(item)) for item in items]
    return {
        "num_samples": Stat(float(len(items)), rule="sum"),
        "target_rollouts": Stat(float(sum(target_rollouts(batch) for batch in batches)), rule="sum"),
        "effective_rollouts": Stat(
            float(sum(batch.meta.get("effective_rollouts", target_rollouts(batch)) for batch in batches)), rule="sum"
        ),
        "avg_total_reward": Stat(mean_or_zero(rewards), float(len(rewards))),
        "avg_completion_length": Stat(mean_or_zero(lengths), float(len(lengths))),
        **entropy_stat(items),
    }


def entropy_stat(items: Sequence[SAWItem]) -> dict[str, Stat]:
    """Return `entropy`, in nats per token: the mean of -log p(token) over the tokens that were
    sampled, p being the distribution that they were sampled from, after temperature and top_p. Its
    expectation over samples is the entropy of p (Monte Carlo); it needs no logits. Without
    log-probabilities it is empty.

    Example: log-probabilities -1.0, -3.0 and -2.0 of two samples: 6.0 / 3 = 2.0.
    """
    sampled = [stored(item.actor_logps, "token_logps") for item in items if item.actor_logps is not None]
    count = sum(map(len, sampled))
    if not count:
        return {}
    return {
        "entropy": Stat(-math.fsum(float(np.asarray(logps, dtype=np.float64).sum()) for logps in sampled) / count, float(count))
    }


def environment_stats(meta: Mapping[str, Any]) -> dict[str, Stat]:
    """Return the statistics of each environment, from the facts in the meta of a batch
    (`environment_facts`): `NAME/avg_sampled_reward` and the like. What an environment has none of
    is left out."""
    stats: dict[str, Stat] = {}
    for name, facts in meta.get(ENVIRONMENTS, {}).items():
        rewards, flat, lengths = (np.asarray(facts[key], dtype=np.float64) for key in ("rewards", "flat", "lengths"))
        own = {"played_rollouts": Stat(float(len(rewards)), rule="sum")}
        own["num_failed_episodes"] = Stat(float(facts["failed"]), rule="sum")
        if len(rewards):
            mean, weight = float(rewards.mean()), float(len(rewards))
            own |= {SAMPLED_REWARD: Stat(mean, weight), "reward_std": Stat(float(rewards.std()), weight, "std", mean)}
        means = {"frac_reward_zero_std": flat, "avg_completion_length": lengths}
        own |= {key: Stat(float(values.mean()), float(len(values))) for key, values in means.items() if len(values)}
        stats |= {f"{name}/{key}": stat for key, stat in own.items()}
    return stats


def named_reward_stats(items: Sequence[SAWItem]) -> dict[str, Stat]:
    """Return `rewards/NAME/mean` and `rewards/NAME/std` (population) of each reward that the
    samples name in their metadata, over the samples that have it. Of several turns, only the last
    has rewards.

    Example: `rewards/short` of 1.0, 0.0 and None have mean 0.5 and std 0.5.
    """
    columns: dict[str, list[float]] = {}
    for item in items:
        for key, value in item.meta.items():
            if key.startswith("rewards/") and isinstance(value, (int, float)):
                columns.setdefault(key, []).append(float(value))
    stats: dict[str, Stat] = {}
    for key, values in columns.items():
        mean, weight = mean_or_zero(values), float(len(values))
        stats[f"{key}/mean"] = Stat(mean, weight)
        stats[f"{key}/std"] = Stat(float(np.std(values)), weight, "std", mean)
    return stats


def reducer_stats(items: Sequence[SAWItem], reducers: Mapping[str, Reducer], rollouts: int) -> dict[str, Stat]:
    """Apply the reducers to the samples of one training step. If a reducer raises, the error is
    logged and the reducer is left out: the optimizer step has already been taken. So is one of an
    environment without samples."""
    stats: dict[str, Stat] = {}
    for name in {each.environment for each in reducers.values()} - {None}:
        if own := [item for item in items if item.meta.get(ENVIRONMENT) == name]:
            chosen = {key: replace(each, environment=None) for key, each in reducers.items() if each.environment == name}
            stats |= reducer_stats(own, chosen, distinct_rollouts(own))
    reducers = {key: each for key, each in reducers.items() if each.environment is None}
    records, counts = [item.meta for item in items], (len(items), rollouts)
    try:
        reduced = apply_reducers(items, records, reducers, counts)
    except Exception:
        reduced = {}
        for name, reducer in reducers.items():
            try:
                reduced |= apply_reducers(items, records, {name: reducer}, counts)
            except Exception:
                logger.exception("reducer %s failed; it is left out of the statistics of this step", name)
    # Over ranks, sums and counts that are not normalised are added up; everything else is a mean
    # weighted by its denominator, by default the number of samples.
    for name, value in reduced.items():
        by = reducers[name].normalize_by
        is_sum = reducers[name].kind != "mean" and by is None
        stats[name] = Stat(value, rule="sum") if is_sum else Stat(value, float(counts[1] if by == "rollouts" else counts[0]))
    return stats


def target_rollouts(batch: SAWBatch) -> int:
    """Number of rollouts that were requested, by the batch's metadata (`batch_size` and
    `num_rollouts` are older names of `target_rollouts`); without that, the number that arrived."""
    for key in ("target_rollouts", "batch_size", "num_rollouts"):
        if batch.meta.get(key) is not None:
            return int(batch.meta[key])
    return distinct_rollouts(batch.items)


def distinct_rollouts(items: Sequence[SAWItem]) -> int:
    """Number of rollouts that the samples come from. A sample without a rollout id counts as a
    rollout of its own. Example: ids a, a, None, None are 3 rollouts."""
    ids = [item.meta.get("rollout_id") for item in items]
    return len({("sample", index) if rollout is None else rollout for index, rollout in enumerate(ids)})


def _completion_length(item: SAWItem) -> int:
    length = item.meta.get("completion_length")
    return int(np.count_nonzero(stored(item, "action_mask"))) if length is None else int(length)


def prefix_keys(stats: Mapping[str, float]) -> dict[str, float]:
    """Put each key under `train/`, `eval/` or `perf/`; `mismatch/*`, `reference/*`, `critic/*`,
    `ranks/*`, `queue/*`, `groups/*`, `actors/*`, `images/*` and `guard/*` keys stay as they are.

    Example: `loss` becomes `train/loss`, `eval_loss` becomes `eval/loss`, and `gpu_x` becomes
    `perf/gpu_x`.
    """
    return {_add_prefix(key): value for key, value in stats.items() if key != "phase"}


def _add_prefix(key: str) -> str:
    if key.startswith(("train/", "eval/", *OWN_PREFIXES)):
        return key
    if key.startswith("eval_"):
        return f"eval/{key.removeprefix('eval_')}"
    if key.startswith("gpu_"):
        return f"perf/{key}"
    return f"train/{key.removeprefix('train_')}" if key == "train_step" else f"train/{key}"


COUNT_KEYS = frozenset(
    {
        *("num_samples", "target_rollouts", "effective_rollouts", "total_completion_tokens"),
        *("num_pairs", "num_chosen", "num_rejected"),
    }
)
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
        return Stat(value, rule="max" if key == f"{MISMATCH}{MISMATCH_MAX}" else "sum")
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
    elif f"num_{name}" in stats:
        weight = stats[f"num_{name}"]
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
    """The measured values; sums of `sum_mismatch` and `sum_reference` become their statistics."""
    sums = {key: stat.value for key, stat in stats.items() if is_mismatch_sum(key) or is_reference_sum(key)}
    plain = {key: stat.value for key, stat in stats.items() if key not in sums and stat.weight > 0}
    return {**plain, **compute_mismatch(sums), **compute_reference(sums)}


def reduce_over_ranks(stats: Mapping[str, Stat], device: torch.device | str) -> dict[str, Stat]:
    """The statistics of all ranks together, as if one rank had all samples. A rank may lack
    keys."""
    if not ranks.is_distributed():
        return dict(stats)
    names = ranks.union_over_ranks([f"{stat.rule} {key}" for key, stat in stats.items()], device)
    keys: list[tuple[Any, str]] = [(rule, key) for rule, _, key in (name.partition(" ") for name in names)]
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
