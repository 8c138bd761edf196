"""The state of a trainer: the parts of a run, and how far it is."""

from __future__ import annotations

from collections.abc import Callable

from ludic.training.algorithm import RLAlgorithm
from ludic.training.backend.protocol import TrainingBackend
from ludic.training.batching.source import BatchSourceBase, as_batch_source
from ludic.training.checkpoint import CheckpointManager
from ludic.training.config import TrainerConfig
from ludic.training.evaluators.protocol import Evaluator
from ludic.training.loop.early_stopping import EarlyStopping
from ludic.training.loop.token_log import TokenLog
from ludic.training.types import BatchSource, ReferencePolicy


class TrainerState:
    """What `Trainer`, which derives from it, the parts of its step and its callbacks read."""

    cfg: TrainerConfig
    algo: RLAlgorithm
    batch_source: BatchSource
    backend: TrainingBackend
    reference: ReferencePolicy | None
    checkpointer: CheckpointManager | None
    evaluator: Evaluator | None
    token_log: TokenLog | None
    should_stop: Callable[[], object] | None
    sync_every_steps: int | None
    """Steps between publications; None: nothing is published."""
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
