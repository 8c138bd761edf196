"""What a training backend of `rollouts.training` must have, three methods, and how a `Trainer`
calls a backend of your own.

`PyTorchTrainingBackend` and `FSDPTrainingBackend` have them. A backend of your own, with plain or
coroutine methods that return futures or mappings, trains in the same loops.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from ludic.errors import ConfigError, ConfigTypeError
from ludic.event_loop import TrainFuture, await_if_needed
from ludic.models.images.rows import IMAGES
from ludic.training.backend.protocol import BackwardResult, MicroBatches
from ludic.training.batching.packing import MicroBatch
from ludic.training.loss import BatchTotals

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


T = TypeVar("T")
COLUMNS = {"weight": "advantages", "action_mask": "loss_mask", "actor_logps": "old_log_probs"}
"""Column of a micro-batch -> its name in a batch by column."""
METHODS = ("forward_backward", "optim_step", "save_checkpoint")


class ForeignBackend:
    """Calls a user's backend for a `Trainer`.

    Its methods may be plain functions, which run in a thread, or coroutine functions. They answer
    with a mapping of numbers, or with a future of one: an object with `result()`. Batches are by
    column (`DictBatch`), on the CPU, one for each optimizer step.
    """

    def __init__(self, backend: Any) -> None:
        missing = [name for name in METHODS if not callable(getattr(backend, name, None))]
        if missing:
            raise ConfigTypeError(f"backend {type(backend).__name__} has no {', '.join(missing)}; it needs {', '.join(METHODS)}")
        self.backend = backend
        self.last_step: dict[str, float] = {}
        """What the last `optim_step` returned."""
        self._grad_norm = float("nan")
        self._metrics: dict[str, float] = {}
        """Of the last step, for a checkpoint that is saved before the step is logged."""
        self._saved: tuple[int, Path] | None = None
        """Step and folder of the last checkpoint."""

    def forward_backward(
        self, batch: MicroBatch | MicroBatches, *, totals: BatchTotals | None = None
    ) -> TrainFuture[BackwardResult]:
        return _Pending("forward_backward", self._forward_backward([batch] if isinstance(batch, MicroBatch) else batch))

    async def _forward_backward(self, batch: MicroBatches) -> BackwardResult:
        result = BackwardResult(torch.zeros(()))
        for micro_batch in batch:
            if IMAGES in micro_batch.tensors:
                raise ConfigError(f"backend {type(self.backend).__name__} gets columns of numbers, and the samples have images")
            tensors = {COLUMNS.get(name, name): value for name, value in micro_batch.tensors.items() if name != "old_logp_action"}
            metrics = await self._ask("forward_backward", {**tensors, "labels": tensors["input_ids"].clone()})
            if "loss" not in metrics:
                raise ConfigError(f"forward_backward returned {', '.join(metrics) or 'nothing'}; it must return loss")
            self._metrics = metrics
            self._grad_norm = float(metrics.get("grad_norm", float("nan")))
            result.loss = result.loss + float(metrics["loss"])
            result.micro_stats.append({name: value for name, value in metrics.items() if name not in ("loss", "grad_norm")})
            result.micro_sizes.append(micro_batch.num_items)
        return result

    def optim_step(self, *, lr_factor: float = 1.0) -> TrainFuture[dict[str, float]]:
        return _Pending("optim_step", self._optim_step())

    async def _optim_step(self) -> dict[str, float]:
        self.last_step = await self._ask("optim_step")
        named = {name: value for name, value in self.last_step.items() if name != "step"}
        self._metrics = {**self._metrics, **named}
        return {"grad_norm": self._grad_norm, "lr": float("nan"), **self.last_step}

    async def save_checkpoint(self, step: int, metrics: Mapping[str, float]) -> Path:
        """Have the backend write a checkpoint where it keeps them, and return its folder. If the
        last one is of this step, that is the folder: backends may number their saves."""
        if self._saved is None or self._saved[0] != step:
            self._saved = step, Path(await self._call("save_checkpoint", step, {**self._metrics, **metrics}))
        return self._saved[1]

    async def _ask(self, method: str, *arguments: Any) -> dict[str, float]:
        answer = await self._call(method, *arguments)
        if not isinstance(answer, Mapping):
            raise ConfigTypeError(f"{method} returned {type(answer).__name__}; it must be a mapping, or a future of one")
        return {name: float(value) for name, value in answer.items()}

    async def _call(self, method: str, *arguments: Any) -> Any:
        """The value of the answer: itself, or what it gives when awaited, or what its `result()`
        gives."""
        function: Callable[..., Any] = getattr(self.backend, method)
        is_coroutine = inspect.iscoroutinefunction(function)
        answer = await function(*arguments) if is_coroutine else await asyncio.to_thread(function, *arguments)
        answer = await await_if_needed(answer)
        result = getattr(answer, "result", None)
        return await await_if_needed(result()) if callable(result) else answer


class _Pending(TrainFuture[T]):
    """A future whose operation runs in the event loop of the first that awaits it."""

    def __init__(self, operation: str, work: Coroutine[Any, Any, T]) -> None:
        super().__init__(operation)
        self._work: Coroutine[Any, Any, T] | None = work

    async def result(self) -> T:
        work, self._work = self._work, None
        if work is not None:
            try:
                self.set_result(await work)
            except BaseException as error:
                self.set_exception(error)
                raise
        return await super().result()
