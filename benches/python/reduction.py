"""Truncation, the check of log-probs, and reducers: the core compared with plain Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from benches.python import reference
from benches.python.contest import Contender, Contest
from benches.python.samples import list_items

from ludic import _core

REDUCERS: list[tuple[str, str, str | None]] = [
    ("mean", "reward", None),
    ("sum", "reward", "rollouts"),
    ("mean", "total_reward", None),
    ("mean", "completion_length", None),
    ("sum", "completion_length", "samples"),
    ("mean", "prompt_length", None),
    ("count_true", "truncated", "samples"),
    ("count_true", "seq_len_truncated", "samples"),
    ("count_true", "env.correct", "samples"),
    ("mean", "env.steps", None),
]
"""Ten reducers. One finds no value, and two read a nested dictionary."""


def contests(samples: int = 1000) -> Iterator[Contest]:
    yield _truncation(samples)
    yield _log_probs()
    yield _records(10_000)
    yield _column(100_000)


def _truncation(samples: int) -> Contest:
    items, limit = list_items(samples), 1024
    table = _core.SampleTable.from_items(items)

    def truncate() -> tuple[Any, Any]:
        view = table.truncate(limit)
        return view.lengths, view.action_counts

    def check(got: tuple[Any, Any], want: list[Any]) -> None:
        assert got[0].tolist() == [len(item.input_ids) for item in want]
        assert got[1].tolist() == [sum(item.action_mask) for item in want]

    plain = Contender("reference: slices of lists", lambda: reference.truncate(items, limit), cold=True)
    ours = Contender("**ludic columns**, lengths and action counts", truncate, check, repeats=20)
    return Contest(f"Truncation of {samples} samples to {limit} tokens", samples, "sample", [plain, ours])


def _log_probs() -> Contest:
    rng = np.random.default_rng(0)
    array = rng.uniform(-3, 0, 500_000).astype(np.float32)
    values = array.tolist()
    ids, mask, offsets = np.ones(len(array), np.int32), np.ones(len(array), np.uint8), np.array([0, len(array)])

    def build_table(logps: Any) -> _core.SampleTable:
        return _core.SampleTable.from_columns(ids, mask, offsets, actor_logps=logps)

    return Contest(
        f"Check of {len(values)} log-probs",
        len(values),
        "float",
        [
            Contender("reference: `isinstance` and a test of each", lambda: reference.are_valid_logps(values), cold=True),
            Contender("**ludic from a list**, checked and stored with ids and mask", lambda: build_table(values), cold=True),
            Contender("**ludic from an array**, checked and stored with ids and mask", lambda: build_table(array), repeats=5),
            Contender("**ludic**, ids and mask alone", lambda: build_table(None), repeats=5),
        ],
    )


def _records(samples: int) -> Contest:
    rng = np.random.default_rng(0)
    records = [
        {
            "reward": float(rng.random()),
            "total_reward": float(rng.random()),
            "completion_length": int(rng.integers(1, 4096)),
            "prompt_length": int(rng.integers(1, 1024)),
            "truncated": bool(rng.random() < 0.2),
            "finish_reason": "stop",
            "step_index": 0,
            "env": {"correct": bool(rng.random() < 0.5), "steps": int(rng.integers(1, 9))},
        }
        for _ in range(samples)
    ]

    def assert_close(got: list[float], want: list[float]) -> None:
        np.testing.assert_allclose(got, want, rtol=1e-9)

    return Contest(
        f"{len(REDUCERS)} reducers over {samples} dictionaries",
        samples * len(REDUCERS),
        "value",
        [
            Contender("reference: one pass per reducer", lambda: reference.reduce_records(records, REDUCERS, samples, samples)),
            Contender(
                "**ludic, one pass for all**", lambda: _core.reduce_records(records, REDUCERS, samples, samples), assert_close
            ),
        ],
    )


def _column(samples: int) -> Contest:
    column = np.random.default_rng(0).random(samples)
    records = [{"reward": value} for value in column.tolist()]

    def reduce_in_python() -> list[float]:
        return reference.reduce_records(records, REDUCERS[:1], samples, samples)

    def check(got: float, want: list[float]) -> None:
        np.testing.assert_allclose(got, want[0], rtol=1e-9)

    ours = Contender("**ludic column**", lambda: _core.reduce_column("mean", column), check, repeats=20)
    return Contest(
        f"A mean over {samples} values", samples, "value", [Contender("reference: dictionaries", reduce_in_python), ours]
    )
