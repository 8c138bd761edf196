"""Statistics of a step from its samples and rollouts: counts, means of rewards and lengths, and the
user's own reducers.

`loop.micro_stats` combines the statistics of a loss into those of a step; docs/metrics.md explains
each key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ludic import _core
from ludic.errors import ConfigError, DataError
from ludic.training.averages import mean_or_zero
from ludic.training.loggers.percent import Percent
from ludic.training.loop.micro_stats import Stat, combine_micro_stats, copy_to_host, final_values
from ludic.training.loss.mismatch import PREFIX
from ludic.training.types import SAWBatch, SAWItem

logger = logging.getLogger(__name__)

KINDS = ("mean", "sum", "count_true")
SAMPLED_REWARD = "avg_sampled_reward"
"""Mean total reward of every rollout of a step, including those whose samples were filtered or
dropped later."""

ReducerKind = Literal["mean", "sum", "count_true"]
Denominator = Literal["samples", "rollouts"]


@dataclass(frozen=True)
class Reducer:
    """One number from the metadata of all samples.

    >>> Reducer("count_true", "result", transform=lambda v: v == "win", normalize_by="rollouts")
    """

    kind: ReducerKind
    """`mean` of the values, their `sum`, or how many are true. Absent values (None) are skipped;
    NaN counts as a value."""
    source: str | Callable[[Any], Any]
    """Dotted path into the metadata, or a function of the sample (of the record, when records are
    reduced)."""
    transform: Callable[[Any], Any] | None = None
    """Applied to each value that is present."""
    normalize_by: Denominator | None = None
    """Divide the sum or count by the number of samples, or of the rollouts that were requested; 0
    if there are none. `count_true` by rollouts counts the rollouts with a true step, so it is a
    rate whatever their length."""
    as_percent: bool = False
    """Make the value a `Percent`: a fraction that displays show as 25.0%."""


def default_reducers() -> dict[str, Reducer]:
    """How often a completion reached its token limit, and a sample `max_seq_len`."""
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


RESERVED_KEYS = frozenset(
    {
        *("step", "loss", "reported_loss", "grad_norm", "lr", "optimizer_steps"),
        *("num_samples", "target_rollouts", "played_rollouts", "effective_rollouts"),
        *("avg_total_reward", SAMPLED_REWARD, "reward_std", "frac_reward_zero_std"),
        *("avg_completion_length", "min_completion_length", "max_completion_length"),
        *("seq_len_truncated_empty", "samples_without_actions", "zero_weight_skipped", "zvp_filter_frac", "policy_lag"),
    }
)
"""What the trainer itself logs under `train/`; a reducer cannot have such a name."""


def check_reducers(reducers: Mapping[str, Reducer]) -> None:
    """Raise ConfigError for a reducer that cannot be applied, or whose name the trainer uses
    itself."""
    for name, reducer in reducers.items():
        _check_reducer(name, reducer)
        key = _add_prefix(name)
        if key.removeprefix("train/") in RESERVED_KEYS or key.startswith(("perf/", PREFIX)):
            raise ConfigError(
                f"a reducer cannot be named {name!r}: {key} is the trainer's own; name it {f'my_{name}'!r}, for example"
            )


def _check_reducer(name: str, reducer: Reducer) -> None:
    if reducer.kind not in KINDS:
        raise ConfigError(f"reducer {name}: kind ({reducer.kind}) must be one of {', '.join(KINDS)}")
    if reducer.normalize_by not in (None, "samples", "rollouts"):
        raise ConfigError(f"reducer {name}: normalize_by ({reducer.normalize_by}) must be samples, rollouts or None")


def apply_reducers_to_records(
    records: Sequence[Mapping[str, Any]],
    reducers: Mapping[str, Reducer],
    *,
    sample_count: int | None = None,
    rollout_count: int | None = None,
) -> dict[str, float]:
    """Reduce records, such as those of an evaluation. Both denominators default to the number of
    records."""
    samples = len(records) if sample_count is None else sample_count
    rollouts = len(records) if rollout_count is None else rollout_count
    return _reduce(records, records, reducers, (samples, rollouts))


def _reduce(
    subjects: Sequence[Any],
    records: Sequence[Mapping[str, Any]],
    reducers: Mapping[str, Reducer],
    counts: tuple[int, int],
) -> dict[str, float]:
    """The core reduces plain paths in one pass; functions produce a column for it."""
    for name, reducer in reducers.items():
        _check_reducer(name, reducer)
    plain = {name: reducer for name, reducer in reducers.items() if _is_plain(reducer)}
    paths = [(reducer.kind, str(reducer.source), reducer.normalize_by) for reducer in plain.values()]
    reduced = dict(zip(plain, _core.reduce_records(records, paths, *counts), strict=True)) if plain else {}
    for name, reducer in reducers.items():
        if name not in reduced:
            values = [_read_value(reducer, subject, record) for subject, record in zip(subjects, records, strict=True)]
            reduced[name] = _reduce_values(reducer, values, records, counts)
    return {name: Percent(reduced[name]) if reducer.as_percent else reduced[name] for name, reducer in reducers.items()}


def _is_plain(reducer: Reducer) -> bool:
    return isinstance(reducer.source, str) and reducer.transform is None


def _read_value(reducer: Reducer, subject: Any, record: Mapping[str, Any]) -> Any:
    value = _read_path(record, reducer.source) if isinstance(reducer.source, str) else reducer.source(subject)
    return value if value is None or reducer.transform is None else reducer.transform(value)


def _read_path(record: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(record, Mapping):
            return None
        record = record.get(key)
    return record


def _reduce_values(reducer: Reducer, values: list[Any], records: Sequence[Mapping[str, Any]], counts: tuple[int, int]) -> float:
    truth = reducer.kind == "count_true"
    if truth and reducer.normalize_by == "rollouts":
        named = [{"value": value, "rollout_id": record.get("rollout_id")} for value, record in zip(values, records, strict=True)]
        return _core.reduce_records(named, [("count_true", "value", "rollouts")], *counts)[0]
    column = np.array([float(bool(value) if truth else value) for value in values if value is not None], dtype=np.float64)
    if reducer.normalize_by is None:
        return _core.reduce_column(reducer.kind, column)
    denominator = counts[0] if reducer.normalize_by == "samples" else counts[1]
    total = _core.reduce_column("count_true" if truth else "sum", column)
    return total / denominator if denominator else 0.0


def _rollout_key(record: Mapping[str, Any], index: int) -> Hashable:
    rollout: Hashable = record.get("rollout_id")
    return ("sample", index) if rollout is None else rollout


def aggregate_stats(
    micro_stats_list: Sequence[Mapping[str, Any]],
    saw_batches: Sequence[SAWBatch],
    *,
    reducers: Mapping[str, Reducer] | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
) -> dict[str, float]:
    """Statistics of a step from those of its micro-batches and from its batches; `{}` without
    micro-batches.

    All tensors come to the host in one transfer. `loop.micro_stats` says how keys are combined. A
    key of which nothing was measured is 0, like `avg_total_reward` of samples without a reward. The
    reducers see the samples of the batches.
    """
    if not micro_stats_list:
        return {}
    sizes = [1] * len(micro_stats_list) if micro_batch_sizes is None else list(micro_batch_sizes)
    if len(sizes) != len(micro_stats_list):
        raise DataError(
            f"micro_batch_sizes ({len(sizes)}) must have as many entries as micro_stats_list ({len(micro_stats_list)})"
        )
    stats = {**combine_micro_stats(copy_to_host(micro_stats_list), sizes), **batch_stats(saw_batches)}
    unmeasured = {key: 0.0 for key, stat in stats.items() if not stat.weight}
    items = [item for batch in saw_batches for item in batch.items]
    counts = len(items), int(stats["target_rollouts"].value)
    return {**unmeasured, **final_values(stats), **_reduce(items, [item.meta for item in items], reducers or {}, counts)}


def batch_stats(batches: Sequence[SAWBatch]) -> dict[str, Stat]:
    """Counts of the batches, and mean reward and length over their samples; a sample without a
    reward is left out of the mean."""
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
    }


def reducer_stats(items: Sequence[SAWItem], reducers: Mapping[str, Reducer], rollouts: int) -> dict[str, Stat]:
    """The reducers over the samples of one training step. A reducer that raises is logged and left
    out, because the step has already been taken."""
    records, counts = [item.meta for item in items], (len(items), rollouts)
    try:
        reduced = _reduce(items, records, reducers, counts)
    except Exception:
        reduced = {}
        for name, reducer in reducers.items():
            try:
                reduced |= _reduce(items, records, {name: reducer}, counts)
            except Exception:
                logger.exception("the reducer %s failed and is left out of this step's statistics", name)
    return {name: _reducer_stat(reducers[name], value, counts) for name, value in reduced.items()}


def _reducer_stat(reducer: Reducer, value: float, counts: tuple[int, int]) -> Stat:
    """How a value joins those of other ranks: plain sums and counts are summed; the rest is
    weighted by its denominator, or by samples."""
    if reducer.kind != "mean" and reducer.normalize_by is None:
        return Stat(value, rule="sum")
    return Stat(value, float(counts[1] if reducer.normalize_by == "rollouts" else counts[0]))


def mark_percents(stats: Mapping[str, float], reducers: Mapping[str, Reducer]) -> dict[str, float]:
    """`stats`, with `Percent` for the reducers that ask for it."""
    shares = {name for name, reducer in reducers.items() if reducer.as_percent}
    return {key: Percent(value) if key in shares else value for key, value in stats.items()}


def target_rollouts(batch: SAWBatch) -> int:
    """Rollouts that were requested. `batch_size` and `num_rollouts` are older names; without any of
    them, the rollouts that arrived."""
    for key in ("target_rollouts", "batch_size", "num_rollouts"):
        if batch.meta.get(key) is not None:
            return int(batch.meta[key])
    return distinct_rollouts(batch.items)


def distinct_rollouts(items: Sequence[SAWItem]) -> int:
    """Rollouts that the samples come from; a sample without a rollout id counts as one."""
    return len({_rollout_key(item.meta, index) for index, item in enumerate(items)})


def _completion_length(item: SAWItem) -> int:
    length = item.meta.get("completion_length")
    return int(np.count_nonzero(item.action_mask)) if length is None else int(length)


def prefix_keys(stats: Mapping[str, float]) -> dict[str, float]:
    """Keys under `train/`, `eval/` or `perf/`; `mismatch/*` stays as it is.

    Example: `loss` becomes `train/loss`, `eval_loss` `eval/loss` and `gpu_x` `perf/gpu_x`.
    """
    return {_add_prefix(key): value for key, value in stats.items() if key != "phase"}


def _add_prefix(key: str) -> str:
    if key.startswith(("train/", "eval/", "perf/", PREFIX)):
        return key
    if key.startswith("eval_"):
        return f"eval/{key.removeprefix('eval_')}"
    if key.startswith("gpu_"):
        return f"perf/{key}"
    return f"train/{key.removeprefix('train_')}" if key == "train_step" else f"train/{key}"
