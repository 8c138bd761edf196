"""The state of a trainer: the parts of a run, and how far it is. The state of each rank in
checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ludic.errors import CheckpointError
from ludic.event_loop import TrainFuture
from ludic.training import ranks
from ludic.training.algorithm import RLAlgorithm
from ludic.training.backend.protocol import TrainingBackend, with_defaults
from ludic.training.batching.overlapped import PENDING, STATES_AFTER
from ludic.training.batching.source import BatchSourceBase, as_batch_source
from ludic.training.checkpoint import CheckpointManager
from ludic.training.config import TrainerConfig
from ludic.training.evaluators.protocol import Evaluator
from ludic.training.loop.early_stopping import EarlyStopping
from ludic.training.loop.step_record import TokenLog
from ludic.training.rng import reseed_for_rank, set_rng_state
from ludic.training.types import BatchSource, ReferencePolicy

if TYPE_CHECKING:
    from ludic.training.critic import Critic

T = TypeVar("T")
SOURCE = "batch_source"
OF_EACH_RANK, RANKS = ("rng_state", SOURCE), "ranks"
"""Entries that differ between ranks, and the key under which a checkpoint has each rank's. A source
that all ranks share has one state, which is not among them."""


class TrainerState:
    """What `Trainer`, which derives from it, the parts of its step and its callbacks read."""

    cfg: TrainerConfig
    algo: RLAlgorithm
    batch_source: BatchSource
    backend: TrainingBackend
    reference: ReferencePolicy | None
    critic: Critic | None = None
    checkpointer: CheckpointManager | None
    evaluator: Evaluator | None
    token_log: TokenLog | None
    should_stop: Callable[[], object] | None
    sync_every_steps: int | None
    """Steps between publications. None means that nothing is published."""
    early_stopping: EarlyStopping
    """The best evaluation so far, and how many came after it."""
    last_eval: dict[str, float]
    """What the last evaluation gave, as it was logged."""
    _step = 0

    @property
    def source(self) -> BatchSourceBase:
        """`batch_source`, with defaults for the optional members that it lacks."""
        return as_batch_source(self.batch_source)

    @property
    def current_step(self) -> int:
        """Number of steps taken; also the version of the weights."""
        return self._step

    async def compute(self, operation: Callable[[TrainingBackend], TrainFuture[T]]) -> T:
        """The result of `operation(backend)`. If batches are generated at the same time, it runs in
        a thread, so that the event loop is free for them; a backend with a worker has its own."""
        if self.source.overlaps and not with_defaults(self.backend).has_worker:
            future = await asyncio.to_thread(operation, self.backend)
        else:
            future = operation(self.backend)
        return await future.result()


def add_ranks(state: dict[str, Any], source: BatchSourceBase) -> None:
    """With several ranks, add the generators and the source of each. All ranks call it."""
    if ranks.is_distributed():
        own = [name for name in OF_EACH_RANK if name in state and not (name == SOURCE and _is_shared(source))]
        state[RANKS] = ranks.gather_json({name: state[name] for name in own})


def restore_of_this_rank(source: BatchSourceBase, metadata: Mapping[str, Any]) -> None:
    """Restore the batch source and the random generators."""
    saved, world = metadata.get(RANKS, [metadata]), ranks.world_size()
    is_shared, is_same_world = _is_shared(source), len(saved) == world
    own = dict(saved[ranks.rank()] if is_same_world else metadata)
    if any(SOURCE in state for state in metadata.get(RANKS, [])):  # each rank had a source of its own
        if is_shared or not is_same_world:
            own[SOURCE] = _find_common_position(saved)
    elif SOURCE in metadata:
        own[SOURCE] = metadata[SOURCE] if is_shared or world == 1 else _remove_pending(metadata[SOURCE])
    if SOURCE in own:
        source.load_state_dict(own[SOURCE])
    if "rng_state" in own:
        set_rng_state(own["rng_state"])
    if not is_same_world:
        reseed_for_rank(ranks.rank())


def _is_shared(source: BatchSourceBase) -> bool:
    """Whether one source feeds all ranks, so that there is one position."""
    return source.divided_by_trainer and not source.shards_across_ranks


def _find_common_position(saved: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The data position of ranks that had a source each. Raises CheckpointError if they differ:
    no other rank, nor a source that ranks share, could go on with all of it."""
    positions = [_remove_pending(state.get(SOURCE)) for state in saved]
    if any(position != positions[0] for position in positions):
        raise CheckpointError(f"resume on {len(saved)} ranks, not {ranks.world_size()}: their saved data positions differ")
    return positions[0]


def _remove_pending(source_state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The state of a source before its pending batches, which belong to the rank that has them."""
    if source_state is None:
        return None
    return {key: value for key, value in source_state.items() if key not in (PENDING, STATES_AFTER)}
