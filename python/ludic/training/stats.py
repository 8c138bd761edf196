"""Numbers about a step: means over micro-batches, with one transfer from the device, and reducers over the samples' metadata.

What a key means when it is aggregated: `gpu_*` is a maximum, counts are sums, everything else is a mean weighted by samples over
the micro-batches that have the key; `mismatch/*` are means over action tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ludic import _core
from ludic.errors import ConfigError, DataError
from ludic.training.loss.mismatch import LARGEST, PREFIX, is_mismatch_sum, mismatch_of
from ludic.training.types import SAWBatch, SAWItem

COUNT_KEYS = frozenset({"num_samples", "target_rollouts", "effective_rollouts", "total_completion_tokens", "num_pairs"})
PAIR_KEYS = frozenset({"accuracy", "chosen_score", "rejected_score", "margin", "score_reg"})
"""Means over the pairs of a micro-batch, where it counts them as `num_pairs`: samples without a partner have no part in them."""
KINDS = ("mean", "sum", "count_true")

ReducerKind = Literal["mean", "sum", "count_true"]
Denominator = Literal["samples", "rollouts"]


@dataclass(frozen=True)
class Reducer:
    """One number from the metadata of all samples.

    >>> Reducer("count_true", "result", transform=lambda v: v == "win", normalize_by="rollouts", as_percent=True)
    """

    kind: ReducerKind
    """`mean` of the values, their `sum`, or how many are true. Absent values (None) are skipped."""
    source: str | Callable[[Any], Any]
    """Dotted path into the metadata, or a function of the sample (of the record, for records)."""
    transform: Callable[[Any], Any] | None = None
    """Applied to each value that is there."""
    normalize_by: Denominator | None = None
    """Divide the sum, or the count, by the number of samples or rollouts; 0 if there is none. `count_true` by rollouts counts the
    rollouts with a true step, so that it is a rate whatever their length."""
    as_percent: bool = False
    """For displays; the value stays a fraction."""


def default_reducers() -> dict[str, Reducer]:
    """How often a completion ran into its token limit, and a sample into `max_seq_len`."""
    return {
        "completion_truncated_rate": Reducer(
            "count_true",
            "finish_reason",
            transform=lambda reason: reason == "length",
            normalize_by="samples",
            as_percent=True,
        ),
        "seq_len_truncated_rate": Reducer("count_true", "seq_len_truncated", normalize_by="samples", as_percent=True),
    }


def apply_reducers_to_records(
    records: Sequence[Mapping[str, Any]],
    reducers: Mapping[str, Reducer],
    *,
    sample_count: int | None = None,
    rollout_count: int | None = None,
) -> dict[str, float]:
    """Reduce records, such as those of an evaluation. Both denominators default to their number."""
    samples = len(records) if sample_count is None else sample_count
    rollouts = len(records) if rollout_count is None else rollout_count
    return _reduce(records, records, reducers, (samples, rollouts))


def _reduce(
    subjects: Sequence[Any],
    records: Sequence[Mapping[str, Any]],
    reducers: Mapping[str, Reducer],
    counts: tuple[int, int],
) -> dict[str, float]:
    """Reducers that are plain paths are done by the core in one pass; functions hand it a column."""
    for name, reducer in reducers.items():
        if reducer.kind not in KINDS:
            raise ConfigError(f"reducer {name}: kind ({reducer.kind}) must be one of {', '.join(KINDS)}")
        if reducer.normalize_by not in (None, "samples", "rollouts"):
            raise ConfigError(f"reducer {name}: normalize_by ({reducer.normalize_by}) must be samples, rollouts or None")
    plain = {name: reducer for name, reducer in reducers.items() if _is_plain(reducer)}
    paths = [(reducer.kind, str(reducer.source), reducer.normalize_by) for reducer in plain.values()]
    reduced = dict(zip(plain, _core.reduce_records(records, paths, *counts), strict=True)) if plain else {}
    for name, reducer in reducers.items():
        if name not in reduced:
            values = [_value(reducer, subject, record) for subject, record in zip(subjects, records, strict=True)]
            reduced[name] = _reduce_values(reducer, values, records, counts)
    return {name: reduced[name] for name in reducers}


def _is_plain(reducer: Reducer) -> bool:
    by_rollout = reducer.kind == "count_true" and reducer.normalize_by == "rollouts"
    return isinstance(reducer.source, str) and reducer.transform is None and not by_rollout


def _value(reducer: Reducer, subject: Any, record: Mapping[str, Any]) -> Any:
    value = _at_path(record, reducer.source) if isinstance(reducer.source, str) else reducer.source(subject)
    return value if value is None or reducer.transform is None else reducer.transform(value)


def _at_path(record: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(record, Mapping):
            return None
        record = record.get(key)
    return record


def _reduce_values(reducer: Reducer, values: list[Any], records: Sequence[Mapping[str, Any]], counts: tuple[int, int]) -> float:
    if reducer.kind == "count_true" and reducer.normalize_by == "rollouts":
        true = {_rollout(record, index) for index, (value, record) in enumerate(zip(values, records, strict=True)) if value}
        return len(true) / counts[1] if counts[1] else 0.0
    truth = reducer.kind == "count_true"
    column = np.array([_number(value, truth) for value in values], dtype=np.float64)
    if reducer.normalize_by is None:
        return _core.reduce_column(reducer.kind, column)
    denominator = counts[0] if reducer.normalize_by == "samples" else counts[1]
    total = _core.reduce_column("count_true" if truth else "sum", column)
    return total / denominator if denominator else 0.0


def _number(value: Any, truth: bool) -> float:
    """NaN stands for an absent value."""
    if value is None:
        return float("nan")
    return float(bool(value)) if truth else float(value)


def _rollout(record: Mapping[str, Any], index: int) -> Hashable:
    rollout: Hashable = record.get("rollout_id")
    return ("sample", index) if rollout is None else rollout


def aggregate_stats(
    micro_stats_list: Sequence[Mapping[str, Any]],
    saw_batches: Sequence[SAWBatch],
    *,
    reducers: Mapping[str, Reducer] | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
) -> dict[str, float]:
    """Statistics of a step from those of its micro-batches and from its batches. No micro-batch gives `{}`.

    A sum over micro-batches happens on the device; one transfer brings all keys to the host.
    """
    if not micro_stats_list:
        return {}
    sizes = [1] * len(micro_stats_list) if micro_batch_sizes is None else list(micro_batch_sizes)
    if len(sizes) != len(micro_stats_list):
        raise DataError(
            f"micro_batch_sizes ({len(sizes)}) must have as many entries as micro_stats_list ({len(micro_stats_list)})"
        )
    return {**to_host(combine_micro_stats(micro_stats_list, sizes)), **batch_stats(saw_batches, reducers=reducers)}


def combine_micro_stats(micro_stats: Sequence[Mapping[str, Any]], sizes: Sequence[float]) -> dict[str, Any]:
    """One value for each key, still on its device. A micro-batch without a key has no say in it."""
    columns: dict[str, list[tuple[Any, Any]]] = {}
    for stats, size in zip(micro_stats, sizes, strict=True):
        for key, value in stats.items():
            weight = stats.get("num_pairs", float(size)) if key in PAIR_KEYS else float(size)
            columns.setdefault(key, []).append((value.detach() if isinstance(value, Tensor) else value, weight))
    combined = {key: _combine(key, column) for key, column in columns.items() if not is_mismatch_sum(key)}
    sums = {key: _combined_sum(key, column) for key, column in columns.items() if is_mismatch_sum(key)}
    return {**combined, **mismatch_of(sums)}


def _combined_sum(key: str, column: Sequence[tuple[Any, Any]]) -> Any:
    values = torch.stack([torch.as_tensor(value) for value, _ in column])
    return values.max() if key == f"{PREFIX}{LARGEST}" else values.sum()


def _combine(key: str, column: Sequence[tuple[Any, Any]]) -> Any:
    values = [value for value, _ in column]
    if key.startswith("gpu_"):
        return torch.stack([torch.as_tensor(value) for value in values]).max()
    if key in COUNT_KEYS:
        return sum(values)
    total = sum(size for _, size in column)
    whole = sum(value * size for value, size in column)
    if isinstance(total, Tensor):  # a count of pairs, which stays on its device
        return whole / total.clamp(min=1)
    return whole / total if total else 0.0


def to_host(values: Mapping[str, Any]) -> dict[str, float]:
    """Python floats, in the order given; all tensors come over in one transfer."""
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    host: dict[str, float] = {}
    if tensors:
        device = next((value.device for value in tensors.values() if value.device.type != "cpu"), torch.device("cpu"))
        packed = torch.stack([value.to(device, torch.float64).reshape(()) for value in tensors.values()])
        host = dict(zip(tensors, packed.tolist(), strict=True))
    return {key: host[key] if key in host else float(value) for key, value in values.items()}


SAMPLED_REWARD = "avg_sampled_reward"
"""Mean total reward of every rollout of a step, also of those whose samples were then filtered or left out."""


def batch_stats(batches: Sequence[SAWBatch], *, reducers: Mapping[str, Reducer] | None = None) -> dict[str, float]:
    """Counts, mean reward and length, and the reducers, over the samples of the batches."""
    items = [item for batch in batches for item in batch.items]
    target = sum(target_rollouts(batch) for batch in batches)
    stats = {
        "num_samples": float(len(items)),
        "target_rollouts": float(target),
        "effective_rollouts": float(sum(batch.meta.get("effective_rollouts", target_rollouts(batch)) for batch in batches)),
        "avg_total_reward": _mean([float(item.meta.get("total_reward", 0.0)) for item in items]),
        "avg_completion_length": _mean([float(_completion_length(item)) for item in items]),
    }
    if reducers:
        stats.update(_reduce(items, [item.meta for item in items], reducers, (len(items), int(target))))
    return stats


def target_rollouts(batch: SAWBatch) -> int:
    """How many rollouts were asked for; `batch_size` and `num_rollouts` are older names, and without any it is those that came."""
    for key in ("target_rollouts", "batch_size", "num_rollouts"):
        if batch.meta.get(key) is not None:
            return int(batch.meta[key])
    return distinct_rollouts(batch.items)


def distinct_rollouts(items: Sequence[SAWItem]) -> int:
    """Rollouts that the samples are from; a sample that names none is one of its own."""
    return len({_rollout(item.meta, index) for index, item in enumerate(items)})


def _completion_length(item: SAWItem) -> int:
    length = item.meta.get("completion_length")
    return int(np.count_nonzero(item.action_mask)) if length is None else int(length)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def group_keys(stats: Mapping[str, float]) -> dict[str, float]:
    """Keys under `train/`, `eval/` or `perf/`: `loss` is `train/loss`, `eval_loss` is `eval/loss`, `gpu_x` is `perf/gpu_x`.
    `mismatch/*` stays as it is."""
    return {_grouped(key): value for key, value in stats.items() if key != "phase"}


def _grouped(key: str) -> str:
    if key.startswith(("train/", "eval/", "perf/", PREFIX)):
        return key
    if key.startswith("eval_"):
        return f"eval/{key.removeprefix('eval_')}"
    if key.startswith("gpu_"):
        return f"perf/{key}"
    return f"train/{key.removeprefix('train_')}" if key == "train_step" else f"train/{key}"
