"""Batches on demand: rollouts are played when the trainer requests a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ludic.errors import ConfigError
from ludic.event_loop import await_if_needed
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.source import BatchSourceBase
from ludic.training.rollouts.engine import RolloutEngine, select_credit_assigner
from ludic.training.rollouts.episodes import SampleCheck
from ludic.training.rollouts.requests import Stateful
from ludic.training.types import CreditAssigner, RequestsFn, SampleFilter, SAWBatch
from ludic.types import Rollout


class RolloutBatchSource(BatchSourceBase):
    """Plays the requests of `requests_fn` with an engine and returns the batch.

    `orchestrator` is an alias of `engine`, and `request_fn` of `requests_fn`. Credit comes from
    `credit_assigner`, or else from `algorithm`.

    `max_steps`: maximum turns of an episode; 1 is a question and an answer. A longer episode is cut
    off and marked as truncated; the engine warns once if this happens to all of them, or with a
    limit of 1 to any. `on_rollouts` is called with the rollouts of each batch.

    The source does not divide prompts among ranks: the same `requests_fn` on every rank plays the
    same prompts with the same seeds. If `requests_fn` returns different prompts on each rank, set
    `shards_across_ranks=True`; with several ranks, the trainer raises otherwise.

    The state is the engine's and, if it has one, `requests_fn`'s. It advances when a batch
    is returned: a resumed run plays a failed or unfinished batch again.
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
        on_rollouts: Callable[[list[Rollout]], object] | None = None,
    ) -> None:
        self.engine: RolloutEngine = _pick_argument(orchestrator, engine, "orchestrator", "engine")
        self.requests_fn: RequestsFn = _pick_argument(requests_fn, request_fn, "requests_fn", "request_fn")
        self.credit_assigner = select_credit_assigner(algorithm, credit_assigner)
        self.max_steps = max_steps
        self.timeout_s = timeout_s
        self.concurrency = concurrency
        self.sample_filter = sample_filter
        self.shards_across_ranks = shards_across_ranks
        self._logging: dict[str, Any] = {} if on_rollouts is None else {"on_rollouts": on_rollouts}
        self._state_before: dict[str, Any] | None = None
        """The state before the batch that is being played or that failed."""

    async def next_batch(self) -> SAWBatch:
        """Play the next requests. Raises RequestsExhausted if `requests_fn` has none left."""
        self._state_before = self._current_state()
        requests = await await_if_needed(self.requests_fn())
        batch = await self.engine.generate_batch(
            requests=requests,
            max_steps=self.max_steps,
            credit_assigner=self.credit_assigner,
            timeout_s=self.timeout_s,
            concurrency=self.concurrency,
            sample_filter=self.sample_filter,
            **self._logging,
        )
        self._state_before = None
        return batch

    def use_check(self, check: SampleCheck) -> bool:
        if isinstance(self.engine, RolloutEngine):
            self.engine.check = check
        return isinstance(self.engine, RolloutEngine)

    def state_dict(self) -> dict[str, Any]:
        """Return the state before the batch in progress; without one, the current state."""
        return self._current_state() if self._state_before is None else self._state_before

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._state_before = None
        for name, part in self._stateful().items():
            if name in state:
                part.load_state_dict(state[name])

    def _stateful(self) -> dict[str, Stateful]:
        """Return the parts that have a position, by name."""
        parts = {"engine": self.engine, "requests": self.requests_fn}
        return {name: part for name, part in parts.items() if isinstance(part, Stateful)}

    def _current_state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._stateful().items()}


def _pick_argument(first: Any, second: Any, first_name: str, second_name: str) -> Any:
    """Return the argument, which was passed under one of its two names."""
    if (first is None) == (second is None):
        raise ConfigError(f"pass either {first_name} or {second_name}: they are two names of one parameter")
    return second if first is None else first
