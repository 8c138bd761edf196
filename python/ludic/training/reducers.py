"""The user's statistics: each reducer makes one number of the metadata of samples or records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ludic import _core
from ludic.errors import ConfigError
from ludic.training.loggers.base import Percent

KINDS = ("mean", "sum", "count_true")
ReducerKind = Literal["mean", "sum", "count_true"]
Denominator = Literal["samples", "rollouts"]


@dataclass(frozen=True)
class Reducer:
    """Reduces the metadata of all samples to one number.

    >>> Reducer("count_true", "result", transform=lambda v: v == "win", normalize_by="rollouts")
    """

    kind: ReducerKind
    """`mean` of the values, their `sum`, or the number of true ones. Missing values (None) are
    skipped; NaN counts as a value."""
    source: str | Callable[[Any], Any]
    """Dotted path into the metadata, or a function that gets the sample (the record, for
    `apply_reducers_to_records`)."""
    transform: Callable[[Any], Any] | None = None
    """Applied to each value that is not None."""
    normalize_by: Denominator | None = None
    """Divide the sum or count by the number of samples, or by the number of requested rollouts; the
    result is 0 if that number is 0. `count_true` by rollouts counts each rollout with at least one
    true step once, so the result is a rate for episodes of any length."""
    as_percent: bool = False
    """Return a `Percent`: a fraction that terminals display as 25.0%."""
    environment: str | None = None
    """Of a training step: only samples of this environment of a run with several. The denominator
    is their number, or the number of rollouts that they are of."""


def default_reducers() -> dict[str, Reducer]:
    """The rate of completions that reached the token limit, and the rate of samples that were cut
    to `max_seq_len`."""
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


def check_reducer(name: str, reducer: Reducer) -> None:
    """Raise ConfigError for a reducer with an invalid setting."""
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
    """Apply reducers to records, such as the records of an evaluation. Both denominators default to
    the number of records."""
    samples = len(records) if sample_count is None else sample_count
    rollouts = len(records) if rollout_count is None else rollout_count
    return apply_reducers(records, records, reducers, (samples, rollouts))


def apply_reducers(
    subjects: Sequence[Any],
    records: Sequence[Mapping[str, Any]],
    reducers: Mapping[str, Reducer],
    counts: tuple[int, int],
) -> dict[str, float]:
    """Reduce all plain paths in one pass of the core; for a function, compute its values first and
    reduce that column. `counts`: the number of samples and the number of rollouts."""
    for name, reducer in reducers.items():
        check_reducer(name, reducer)
        if reducer.environment is not None:
            raise ConfigError(
                f"reducer {name}: environment ({reducer.environment}) selects samples of a training step; leave it out"
            )
    plain = {name: each for name, each in reducers.items() if isinstance(each.source, str) and each.transform is None}
    paths = [(reducer.kind, str(reducer.source), reducer.normalize_by) for reducer in plain.values()]
    reduced = dict(zip(plain, _core.reduce_records(records, paths, *counts), strict=True)) if plain else {}
    for name, reducer in reducers.items():
        if name not in reduced:
            values = [_read_value(reducer, subject, record) for subject, record in zip(subjects, records, strict=True)]
            reduced[name] = _reduce_column(reducer, values, records, counts)
    return {name: Percent(reduced[name]) if reducer.as_percent else reduced[name] for name, reducer in reducers.items()}


def _read_value(reducer: Reducer, subject: Any, record: Mapping[str, Any]) -> Any:
    value: Any = record
    if isinstance(reducer.source, str):
        for key in reducer.source.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
    else:
        value = reducer.source(subject)
    return value if value is None or reducer.transform is None else reducer.transform(value)


def _reduce_column(reducer: Reducer, values: list[Any], records: Sequence[Mapping[str, Any]], counts: tuple[int, int]) -> float:
    counts_true = reducer.kind == "count_true"
    if counts_true and reducer.normalize_by == "rollouts":
        named = [{"value": value, "rollout_id": record.get("rollout_id")} for value, record in zip(values, records, strict=True)]
        return _core.reduce_records(named, [("count_true", "value", "rollouts")], *counts)[0]
    present = [value for value in values if value is not None]
    column = np.array([float(bool(value) if counts_true else value) for value in present], dtype=np.float64)
    if reducer.normalize_by is None:
        return _core.reduce_column(reducer.kind, column)
    denominator = counts[0] if reducer.normalize_by == "samples" else counts[1]
    total = _core.reduce_column("count_true" if counts_true else "sum", column)
    return total / denominator if denominator else 0.0
