"""What a training backend of `rollouts.training` must have: three methods.

`PyTorchTrainingBackend` and `FSDPTrainingBackend` have them. A backend of your own, with plain or
coroutine methods that return futures or mappings, trains in the same loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ludic.training.backend.futures import TrainFuture

Metrics = dict[str, float]
DictBatch = Mapping[str, Any]
"""A batch by column. B rows, T tokens; all tensors are aligned with the tokens, nothing is shifted.

- `input_ids` [B, T] int64, `attention_mask` [B, T] (default: all ones); or packed [1, S] with
  `cu_seqlens` [B + 1], the offset of each row and the total length.
- `labels`: `input_ids`, or -100 where a token is not trained. `loss_mask`: 1 on trained tokens.
- `advantages` [B] or [B, T], `old_log_probs` [B, T] or [B], `ref_log_probs` [B, T].
"""


@runtime_checkable
class TrainingBackend(Protocol):
    """A model that is trained on batches by column."""

    def forward_backward(self, batch: DictBatch) -> TrainFuture[Metrics]:
        """Add the gradient of the batch. Returns `loss`, `grad_norm` and other statistics."""
        ...

    def optim_step(self) -> TrainFuture[Metrics]:
        """Step the optimizer and clear the gradient. Returns `lr`, `step` and others."""
        ...

    async def save_checkpoint(self, step: int, metrics: Mapping[str, Any]) -> Path:
        """Write a checkpoint, and return its folder."""
        ...
