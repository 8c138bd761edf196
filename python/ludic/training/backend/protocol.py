"""The interface between the trainer, its checks and its evaluators, and the model, which may be in
another process.

Every call returns a `TrainFuture` without waiting; the result may come later. Await it directly,
`await backend.forward_backward(batch).result()`, or keep it, do other work, and await it later. The
trainer awaits most results, but blocks its thread while it writes and reads checkpoints: complete
futures from another thread than the event loop's.

A `WeightStream` is how the weights of a sharded model are published:

    rank 0         reads: bucket 0, bucket 1, ..; a bucket is dropped when the next one is requested
    other ranks    send their parts of the bucket that rank 0 asks for, until it needs no more
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.event_loop import TrainFuture
from ludic.models import shard_transfer
from ludic.models.flops import FlopCounter
from ludic.models.published import ParamFilter
from ludic.models.regions import split_in_buckets
from ludic.models.shard_transfer import SharedTensor, make_buffers, transfer
from ludic.training import ranks
from ludic.training.batching.mini_batches import MiniBatch
from ludic.training.batching.packing import MicroBatch
from ludic.training.loss import BatchTotals
from ludic.training.loss.base import ScoreType

MicroBatches = list[MicroBatch] | MiniBatch
"""The micro-batches of a mini-batch, which can be iterated twice. A `MiniBatch` collates each when
it is reached."""


@dataclass
class BackwardResult:
    """The result of `forward_backward`. Tensors stay on their device."""

    loss: Tensor
    """[] sum of the scaled losses of all micro-batches."""
    micro_stats: list[dict[str, Any]] = field(default_factory=list)
    """Statistics of the loss, for each micro-batch."""
    micro_sizes: list[int] = field(default_factory=list)
    """Samples of each micro-batch."""
    images: dict[str, float] = field(default_factory=dict)
    """Counts of the images and of the passes of the vision tower (`images/*`); {} without
    images."""


class ForwardPasses(Protocol):
    """Forward passes in evaluation mode and without gradient: all that an evaluator needs."""

    @property
    def computes_trees(self) -> bool:
        """Whether the batches may be rows of prefix trees. A backend of yours without this member
        gets rows of their own."""
        return False

    def forward_logprobs(
        self,
        batch: MicroBatch,
        *,
        temperature: float | None = None,
        top_p: float = 1.0,
        adapters: bool = True,
        actions_only: bool = False,
    ) -> TrainFuture[Tensor]:
        """[B, T - 1] log-probability of each next token at `temperature` (the policy's if None),
        renormalised over the smallest set of tokens that reaches `top_p`. `adapters=False`: under
        the model without its adapters; given only where a reference needs it. `actions_only`: 0
        where the next token is no action; given only to backends that have this argument. Of a
        batch with prefix trees it is always so."""

    def forward_scores(self, batch: MicroBatch, *, score_type: ScoreType = "reward") -> TrainFuture[Tensor]:
        """[B] score of each row: the reward of a reward model, or a log-probability of the
        actions (`loss.preference`)."""


class TrainingBackend(ForwardPasses, Protocol):
    """A model that is trained, with its optimizer.

    With several ranks, all ranks call every method. Only the backend itself reads the files of
    `save` and the values of `snapshot_weights`. Optional members: `BackendBase`.
    """

    def forward_backward(
        self, batch: MicroBatch | MicroBatches, *, totals: BatchTotals | None = None
    ) -> TrainFuture[BackwardResult]:
        """Add the gradients of the micro-batches. `totals` belong to the whole mini-batch."""

    def optim_step(self, *, lr_factor: float = 1.0) -> TrainFuture[dict[str, float]]:
        """Clip the gradient, step the optimizer and clear the gradient. Returns `grad_norm`, the
        norm before clipping (0 without a gradient), and `lr`. Raises NonFiniteError, with
        unchanged weights, for a loss or a norm that is not finite."""

    def export_weights(self, *, param_filter: ParamFilter | None = None) -> TrainFuture[dict[str, Tensor]]:
        """The weights that a policy server needs, by name."""

    def save(self, path: str | Path | None, *, optimizer: bool = True) -> TrainFuture[None]:
        """Write the weights, and with `optimizer` the optimizer's state, into the folder. A rank
        that gets None writes nothing and only takes part in collectives."""

    def load(self, path: str | Path, *, optimizer: bool = True) -> TrainFuture[None]:
        """Read what `save` wrote. If the folder has no optimizer state, the optimizer keeps its
        own."""

    def snapshot_weights(self) -> TrainFuture[Any]:
        """A copy of the trained weights, which later steps do not change, for `restore_weights`."""

    def restore_weights(self, snapshot: Any) -> TrainFuture[None]:
        """Set the trained weights to a snapshot of the same backend."""


class BackendBase:
    """Optional members of a `TrainingBackend`, with their defaults. A backend that does
    not derive from this class has the defaults."""

    model: nn.Module | None = None
    """The model, if it is in this process."""
    optimizer: torch.optim.Optimizer | None = None
    """Its optimizer."""
    flops: FlopCounter | None = None
    """Counts the FLOPs of its passes, if the model is in this process."""

    @property
    def has_worker(self) -> bool:
        """Whether operations run in a thread of the backend."""
        return False

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has a part of the model, and writes files of its own in `save`."""
        return False

    @property
    def shares_prefixes(self) -> bool | None:
        """Whether the mini-batches of `forward_backward` may be rows of prefix trees
        (`TreeMiniBatch`). None means never."""
        return None

    def drop_gradient(self) -> TrainFuture[None]:
        """Clear the gradient without an optimizer step, for a batch that a callback skips."""
        raise ConfigError(f"{type(self).__name__} cannot skip a batch; define drop_gradient, as in BackendBase")

    def offload(self) -> TrainFuture[None]:
        """Move weights and optimizer to host memory, from which they can be published and saved,
        until `reload`. No gradient may have accumulated."""
        raise ConfigError(f"{type(self).__name__} cannot offload; define offload and reload, or set offload=False")

    def reload(self) -> TrainFuture[None]:
        """Undo `offload`."""
        raise NotImplementedError

    def note_step(self, step: int) -> None:
        """The trainer has taken `step` steps, each of one or more optimizer steps. A subclass may
        number its weights so; called before they are published and saved."""

    def save_as_held(self, path: str | Path | None, *, optimizer: bool = True) -> TrainFuture[None]:
        """`TrainingBackend.save` for a shallow checkpoint, if there is a `model`: each rank writes
        the parts that it has. `load` reads both."""
        raise NotImplementedError

    def stream_weights(self, *, param_filter: ParamFilter | None = None) -> WeightStream:
        """`TrainingBackend.export_weights` of a sharded model, gathered on rank 0 while they are
        read. All ranks call this."""
        raise NotImplementedError


def with_defaults(backend: object) -> BackendBase:
    """`backend`, or the defaults if it does not derive from `BackendBase`."""
    return backend if isinstance(backend, BackendBase) else BackendBase()


DOING = "publishing weights"


class WeightStream:
    """(name, whole tensor) on rank 0, sorted by name. It can be iterated several times; each time
    the weights are gathered again.

    >>> stream = backend.stream_weights()
    >>> with stream.shared():             # on all ranks
    ...     if ranks.rank() == 0:
    ...         publisher.publish_stream(stream, version=17)

    Rank 0 has one bucket in memory (`shard_transfer.BUCKET_BYTES` and less than one tensor more),
    the others nothing but their parts.
    """

    def __init__(self, tensors: Mapping[str, SharedTensor], device: torch.device | str | None = None) -> None:
        """`device`: where rank 0 gets the tensors. None means where they arrive."""
        self._tensors = {name: tensors[name] for name in sorted(tensors)}
        self._buckets = split_in_buckets(
            {name: tensor.size for name, tensor in self._tensors.items()}, shard_transfer.BUCKET_BYTES
        )
        self._owners = dict.fromkeys(self._tensors, 0)
        self._device = device
        self._cuda_device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._failed = False

    def describe(self) -> dict[str, Tensor]:
        """Name -> an empty tensor on the device `meta` of the same shape and dtype."""
        return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in self._tensors.items()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._cuda_device is not None:
            torch.cuda.set_device(self._cuda_device)  # of this thread, in which a publisher may run
        for number in range(len(self._buckets)):
            arrived = self._gather(number)
            for name in list(arrived):
                tensor = arrived.pop(name)
                yield name, tensor if self._device is None else tensor.to(self._device)

    def _gather(self, number: int) -> dict[str, Tensor]:
        bucket = {name: self._tensors[name] for name in self._buckets[number]}
        buffers: dict[str, Tensor] = {}

        def begin() -> int:
            buffers.update(make_buffers(bucket, self._owners))
            return number

        self._tell(begin)
        transfer(bucket, self._owners, buffers)
        return buffers

    def _tell(self, command: Callable[[], int | None]) -> None:
        """Tell the other ranks what `command` returns: the number of a bucket, or None at the
        end."""
        try:
            ranks.ask_rank_0(DOING, command)
        except Exception:
            self._failed = True  # the others know, and wait for nothing more
            raise

    @contextmanager
    def shared(self) -> Iterator[None]:
        """In the block, rank 0 may iterate. The other ranks serve it until its block ends; an error
        there is raised on all."""
        if ranks.rank() != 0:
            while (number := ranks.ask_rank_0(DOING, _ask_for_nothing)) is not None:
                transfer({name: self._tensors[name] for name in self._buckets[number]}, self._owners, {})
            yield
            return
        try:
            yield
        except Exception as error:
            if not self._failed:
                self._end(error)
            raise
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        def end() -> None:
            if error is not None:
                raise error

        self._tell(end)


def _ask_for_nothing() -> int | None:
    """The question of ranks other than 0, which is never asked."""
    return None
