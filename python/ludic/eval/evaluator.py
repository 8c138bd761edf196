"""Evaluators that a trainer can use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ludic.eval.core import Metrics, Record, RolloutGenerator, run_eval
from ludic.event_loop import await_if_needed
from ludic.training.stats import Reducer
from ludic.training.types import RequestsFn, RolloutRequest


class Evaluator(Protocol):
    """Measures the policy. The evaluator has its own value for each argument that is None."""

    async def eval(
        self,
        *,
        requests: Sequence[RolloutRequest] | None = None,
        reducers: Mapping[str, Reducer] | None = None,
        max_steps: int | None = None,
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> tuple[list[Record], Metrics]:
        """(records, metrics)."""


@dataclass(frozen=True)
class EngineEvaluator:
    """Plays the requests of `requests_fn` with an engine. For `Trainer(evaluator=...)`."""

    engine: RolloutGenerator
    requests_fn: RequestsFn
    """A plain or a coroutine function."""
    reducers: Mapping[str, Reducer]
    max_steps: int = 1
    timeout_s: float | None = None
    """Deadline of each model call, in seconds."""
    concurrency: int = 32

    async def eval(
        self,
        *,
        requests: Sequence[RolloutRequest] | None = None,
        reducers: Mapping[str, Reducer] | None = None,
        max_steps: int | None = None,
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> tuple[list[Record], Metrics]:
        """See `run_eval`. Arguments that are not None override the evaluator's own."""
        return await run_eval(
            engine=self.engine,
            requests=await await_if_needed(self.requests_fn()) if requests is None else requests,
            reducers=self.reducers if reducers is None else reducers,
            max_steps=self.max_steps if max_steps is None else max_steps,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            concurrency=self.concurrency if concurrency is None else concurrency,
        )
