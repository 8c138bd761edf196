"""The members of a trainer that its callbacks may read."""

from __future__ import annotations

from typing import Protocol

from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.source import PENDING_PATIENCE_S
from ludic.training.checkpoint import CheckpointManager
from ludic.training.config import TrainerConfig


class CalledRun(Protocol):
    """A run that calls callbacks."""

    cfg: TrainerConfig
    algo: RLAlgorithm
    checkpointer: CheckpointManager | None

    @property
    def current_step(self) -> int: ...

    @property
    def last_eval(self) -> dict[str, float]: ...

    async def ensure_checkpoint(self, *, patience_s: float = PENDING_PATIENCE_S) -> None: ...
