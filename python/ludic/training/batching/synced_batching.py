"""Batches on demand: the rollouts of a step are played when the trainer asks for it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ludic.errors import ConfigError
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.source import BatchSourceBase
from ludic.training.rollouts.engine import RolloutEngine, select_credit_assigner
from ludic.training.types import CreditAssigner, RequestsFn, SampleFilter, SAWBatch


class RolloutBatchSource(BatchSourceBase):
    """Plays the requests of `requests_fn` with an engine and gives the batch.

    `orchestrator` and `engine`, `requests_fn` and `request_fn` are two spellings of one parameter.
    Credit is that of `credit_assigner` or of `algorithm`.

    `max_steps` is how many turns an episode may have; 1 is a question and an answer. One that is
    cut there ends as truncated, and the engine warns once where all are.

    It knows no rank: the same `requests_fn` on every rank plays the same prompts on each, with the
    same seeds. Where it gives each rank prompts of its own, say so with `shards_across_ranks`; a
    trainer on several ranks refuses a source that does not.

    Its state is that of the engine and, where it has one, of the requests' source. It counts
    batches that were given: one that failed or is still being played is played by a run that
    resumes from it.
    """

    def __init__(
        self,
        *,
        orchestrator: RolloutEngine | None = None,
        credit_assigner: CreditAssigner | None = None,
        requests_fn: RequestsFn | None = None,
        max_steps: int = 1,
        timeout_s: float | None = None,
        concurrency: int = 8,
        sample_filter: SampleFilter | None = None,
        engine: RolloutEngine | None = None,
        request_fn: RequestsFn | None = None,
        algorithm: RLAlgorithm | None = None,
        shards_across_ranks: bool = False,
    ) -> None:
        self.engine: RolloutEngine = _one(orchestrator, engine, "orchestrator", "engine")
        self.requests_fn: RequestsFn = _one(requests_fn, request_fn, "requests_fn", "request_fn")
        self.credit_assigner = select_credit_assigner(algorithm, credit_assigner)
        self.max_steps = max_steps
        self.timeout_s = timeout_s
        self.concurrency = concurrency
        self.sample_filter = sample_filter
        self.shards_across_ranks = shards_across_ranks
        self._before: dict[str, Any] | None = None
        """The state before the batch that is being played, or that failed."""

    async def next_batch(self) -> SAWBatch:
        """Play the next requests. RequestsExhausted passes through when there are none."""
        self._before = self._now()
        requests = self.requests_fn()
        if inspect.isawaitable(requests):
            requests = await requests
        batch = await self.engine.generate_batch(
            requests=requests,
            max_steps=self.max_steps,
            credit_assigner=self.credit_assigner,
            timeout_s=self.timeout_s,
            concurrency=self.concurrency,
            sample_filter=self.sample_filter,
        )
        self._before = None
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._now() if self._before is None else self._before

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._before = None
        for name, part in self._stateful().items():
            if name in state:
                part.load_state_dict(state[name])

    def _now(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._stateful().items()}

    def _stateful(self) -> dict[str, Any]:
        parts = {"engine": self.engine, "requests": self.requests_fn}
        return {name: part for name, part in parts.items() if hasattr(part, "state_dict")}


def _one(first: Any, second: Any, first_name: str, second_name: str) -> Any:
    """The one of two spellings that was used."""
    if (first is None) == (second is None):
        raise ConfigError(f"give {first_name} or {second_name}, which are one parameter, and not both")
    return second if first is None else first
