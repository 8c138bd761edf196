"""Plays requests and reduces the episodes to metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.event_loop import EventLoop
from ludic.list_fields import stored
from ludic.training.rollouts.engine import RolloutEngine
from ludic.training.rollouts.episodes import PlayedRollouts
from ludic.training.rollouts.to_samples import step_facts
from ludic.training.stats import Reducer, apply_reducers_to_records
from ludic.training.types import RolloutRequest
from ludic.types import Rollout, Step

Record = dict[str, Any]
Metrics = dict[str, float]


async def run_eval(
    *,
    engine: RolloutEngine,
    requests: Sequence[RolloutRequest],
    reducers: Mapping[str, Reducer],
    max_steps: int,
    timeout_s: float | None = None,
    concurrency: int = 8,
) -> tuple[list[Record], Metrics]:
    """(a record for each step, the reducers' metrics). No requests give `([], {})`.

    With an engine that counts failures, such as `RolloutEngine`, the metrics have `num_episodes`
    and `num_failed_episodes`. Failed episodes have no records and do not reach the reducers. If all
    fail, the engine's RolloutError passes through.
    """
    if not requests:
        return [], {}
    rollouts = await engine.generate_rollouts(
        requests=requests, max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency
    )
    records, reduced = reduce_rollouts(rollouts, reducers)
    return records, {**count_failures(rollouts), **reduced}


def run_eval_sync(**arguments: Any) -> tuple[list[Record], Metrics]:
    """`run_eval` for synchronous code, with its arguments."""
    return EventLoop().run(run_eval(**arguments), instead="run_eval(...)")


def reduce_rollouts(rollouts: Sequence[Rollout], reducers: Mapping[str, Reducer]) -> tuple[list[Record], Metrics]:
    """(a record for each step, the reducers' metrics)."""
    records = [build_record(rollout, step) for rollout in rollouts for step in rollout.steps]
    return records, apply_reducers_to_records(records, reducers, sample_count=len(records), rollout_count=len(rollouts))


def build_record(rollout: Rollout, step: Step) -> Record:
    """The record of a step: its own facts, overridden by the rollout's meta, overridden by the
    step's info."""
    return {
        **step_facts(rollout, step),
        "completion_length": 0 if step.trace is None else len(stored(step.trace, "completion_token_ids")),
        **rollout.meta,
        **step.info,
    }


def count_failures(rollouts: Sequence[Rollout]) -> Metrics:
    """The episodes that the engine counted; empty for an engine that counts none."""
    if not isinstance(rollouts, PlayedRollouts):
        return {}
    counts = rollouts.counts
    return {"num_episodes": float(counts.num_episodes), "num_failed_episodes": float(counts.num_failed_episodes)}
