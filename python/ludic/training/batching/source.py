"""`BatchSourceBase`: all members of a batch source that the library reads, with their defaults; and
`RolloutBatchSource`, which plays rollouts when the trainer requests a batch.

A user's source needs only `next_batch` (`training.types.BatchSource`); `as_batch_source` adds the
other members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ludic.errors import ConfigError
from ludic.event_loop import await_if_needed
from ludic.training.algorithm import RLAlgorithm
from ludic.training.rollouts.engine import RolloutEngine, select_credit_assigner
from ludic.training.rollouts.episodes import SampleCheck
from ludic.training.rollouts.requests import Stateful
from ludic.training.types import BatchSource, CreditAssigner, RequestsFn, SampleFilter, SAWBatch
from ludic.types import Rollout
from ludic.user_objects import forward_members

PENDING_PATIENCE_S = 600.0
"""How long a checkpoint waits for batches that are being generated."""
STOP_PATIENCE_S = 20.0
"""How long the last checkpoint of a run does."""
BATCH_NUMBER = "batch_number"
"""Key in a batch's meta: how many batches its source had returned before, batches without samples
included."""


class BatchSourceBase:
    """Returns macro-batches. A subclass overrides `next_batch`, and other members as needed."""

    max_lag: int = 0
    """How many batches are started before the trainer requests them."""
    overlaps: bool = False
    """Whether batches are generated while the trainer computes. The trainer then computes in a
    thread."""
    shards_across_ranks: bool | None = None
    """Whether each rank gets different samples. False if all ranks get the same, None if it is not
    known."""
    divided_by_trainer: bool = False
    """Whether all ranks get the same samples and the trainer divides them over the ranks
    (`SharedBatches`)."""
    pairs_incomplete: int = 0
    """Number of incomplete preference pairs that the source has dropped."""

    async def next_batch(self) -> SAWBatch:
        """The next macro-batch. Raises RequestsExhausted or StopAsyncIteration if there is none."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state for checkpoints, as plain JSON values; None for a source without
        state."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position in `state`."""

    async def finish_pending(self, timeout_s: float = PENDING_PATIENCE_S) -> None:
        """Wait until what runs in the background is in `state_dict`, for at most `timeout_s`
        seconds. A checkpoint is saved next."""

    async def checkpoint_saved(self) -> None:
        """A checkpoint with the last `state_dict` is on disk. What only older ones need can be
        deleted."""

    async def aclose(self) -> None:
        """Stop all background work."""

    def limit(self, num_batches: int) -> None:
        """Set how many more batches the run needs."""

    def use_check(self, check: SampleCheck) -> bool:
        """Refuse with `check` what cannot be trained on, where it comes in: an episode or an entry
        of a queue, and not a whole batch. The trainer calls this before each batch. Returns whether
        the source does so; else the trainer checks its batches."""
        return False

    def unshard(self) -> None:
        """Return the samples of all ranks from now on. `SharedBatches` calls this before the first
        batch. Raises ConfigError for a source that gives each rank its own samples and cannot do
        so."""
        if self.shards_across_ranks:
            raise ConfigError(f"{type(self).__name__} sets shards_across_ranks; pass it to the trainer without SharedBatches")


OPTIONAL_MEMBERS = tuple(name for name in vars(BatchSourceBase) if not name.startswith("_") and name != "next_batch")


def as_batch_source(source: BatchSource) -> BatchSourceBase:
    """Return `source` if it is a BatchSourceBase, else an adapter around it."""
    return source if isinstance(source, BatchSourceBase) else _AdaptedSource(source)


@forward_members("_source", OPTIONAL_MEMBERS)
class _AdaptedSource(BatchSourceBase):
    """A user's source with defaults for the members that it lacks."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    async def next_batch(self) -> SAWBatch:
        return await self._source.next_batch()


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
