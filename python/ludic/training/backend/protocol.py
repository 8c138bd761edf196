"""What the trainer, its checks and its evaluators ask of a model, wherever it is.

Every call returns a `TrainFuture` at once; the answer may come later. The trainer mostly awaits it,
but blocks its thread for it where checkpoints are written and read: complete futures from another
thread than the event loop's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ludic.models.published import ParamFilter
from ludic.training.backend.futures import TrainFuture
from ludic.training.batching.micro_batching import MicroBatch
from ludic.training.loss import BatchTotals
from ludic.training.loss.base import ScoreType


class MicroBatches(Protocol):
    """The micro-batches of a mini-batch: a list, or one that collates as it goes. It can be
    iterated twice."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[MicroBatch]: ...


@dataclass
class BackwardResult:
    """What `forward_backward` measured. Tensors stay on their device."""

    loss: Tensor
    """[] loss of all micro-batches: their scaled losses summed."""
    micro_stats: list[dict[str, Any]] = field(default_factory=list)
    """Statistics of the loss, for each micro-batch."""
    micro_sizes: list[int] = field(default_factory=list)
    """Samples of each micro-batch."""


class ForwardPasses(Protocol):
    """Forward passes in evaluation mode and without gradient: all that an evaluator needs."""

    def forward_logprobs(self, batch: MicroBatch, *, temperature: float | None = None, top_p: float = 1.0) -> TrainFuture[Tensor]:
        """[B, T - 1] log-probability of each next token: at the policy's temperature or at
        `temperature`, renormalised over the smallest set of tokens that reaches `top_p`."""

    def forward_scores(self, batch: MicroBatch, *, score_type: ScoreType = "reward") -> TrainFuture[Tensor]:
        """[B] score of each row: the reward of a reward model, or a log-probability of the
        actions (`loss.preference`)."""


class TrainingBackend(ForwardPasses, Protocol):
    """A model that is trained, with its optimizer.

    With several ranks, all call every method. The files of `save` and the values of
    `snapshot_weights` are the backend's own affair: nobody else reads them.
    """

    def forward_backward(
        self, batch: MicroBatch | MicroBatches, *, totals: BatchTotals | None = None
    ) -> TrainFuture[BackwardResult]:
        """Add the gradient of the micro-batches. `totals` are those of the mini-batch that they
        belong to."""

    def optim_step(self, *, lr_factor: float = 1.0) -> TrainFuture[dict[str, float]]:
        """Clip, step and clear the gradient. Returns `grad_norm` (before clipping; 0 where no
        gradient came, and nothing was learnt) and `lr`. `NonFiniteError` leaves the weights
        unchanged."""

    def export_weights(self, *, param_filter: ParamFilter | None = None) -> TrainFuture[dict[str, Tensor]]:
        """What a policy server needs, by name."""

    def save(self, path: str | Path | None, *, optimizer: bool = True) -> TrainFuture[None]:
        """Write the weights, and with `optimizer` its state, into the folder. A rank that is given
        None writes nothing and only takes part in collectives."""

    def load(self, path: str | Path, *, optimizer: bool = True) -> TrainFuture[None]:
        """Read what `save` wrote. A folder without optimizer state leaves the optimizer as it
        is."""

    def snapshot_weights(self) -> TrainFuture[Any]:
        """A copy of the trained weights for `restore_weights`, which survives optimizer steps."""

    def restore_weights(self, snapshot: Any) -> TrainFuture[None]:
        """Set the trained weights to those of a snapshot of the same backend."""
