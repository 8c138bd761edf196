"""Losses as backends take them: a `Loss`, one of the functions of `rl_losses`, or any function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ludic.errors import ConfigError, ConfigTypeError, DataError
from ludic.rollouts.training.rl_losses import GRPO_LOSS, SFT_LOSS, PPOLoss, grpo_loss, ppo_loss, sft_loss
from ludic.training import ranks
from ludic.training.loss.base import Loss, as_loss, with_reported_loss
from ludic.training.loss.batch import Batch, Stats
from ludic.training.loss.context import SharedContext

COLUMNS = {
    "labels": "input_ids",
    "loss_mask": "action_mask",
    "advantages": "weight",
    "old_log_probs": "actor_logps",
    "ref_log_probs": "ref_log_probs",
}
"""Parameter of a loss function -> the column that it gets if the batch has none of that name."""


def as_training_loss(loss_fn: Any) -> Loss:
    """`loss_fn` as a `Loss`.

    A `Loss`, or an object with `compute`, stays. `sft_loss`, `grpo_loss` and `ppo_loss`, also with
    settings bound by `functools.partial`, become the class behind them: their log-probabilities
    are computed in chunks, and their batches can be split. Another function becomes a
    `FunctionLoss`.
    """
    if isinstance(loss_fn, Loss) or not callable(loss_fn):
        return as_loss(loss_fn)
    function, settings = (loss_fn.func, loss_fn.keywords) if isinstance(loss_fn, partial) and not loss_fn.args else (loss_fn, {})
    if function is ppo_loss:
        return PPOLoss(**{name: value for name, value in settings.items() if name != "return_metrics"})
    if function in (grpo_loss, sft_loss) and not settings:
        return GRPO_LOSS if function is grpo_loss else SFT_LOSS
    return FunctionLoss(loss_fn)


def name_ratio_loss(loss: Loss) -> str | None:
    """The function behind a loss that cannot be computed without the log-probabilities of the
    policy that sampled; None for other losses."""
    if isinstance(loss, PPOLoss):
        return ppo_loss.__name__
    return _name(loss.function) if isinstance(loss, FunctionLoss) and "old_log_probs" in loss.required else None


class FunctionLoss(Loss):
    """Calls a function with the columns that its parameters name: `logits`, `labels`, `loss_mask`,
    `advantages`, `old_log_probs`, `ref_log_probs`, and `batch`, the mapping that has them and all
    others.

    The function returns a scalar, or (scalar, mapping of statistics). It gets the batch of an
    optimizer step whole, since nobody knows how its value would add up over parts. On several ranks
    the mean over ranks is trained.
    """

    scales_itself = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        known = ("logits", "batch", *COLUMNS)
        self._takes = [each.name for each in parameters if each.name in known]
        self.required = [each.name for each in parameters if each.default is each.empty and each.name in known]
        unknown = [
            each.name
            for each in parameters
            if each.name not in known and each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        ]
        if unknown or any(each.kind is each.POSITIONAL_ONLY for each in parameters):
            raise ConfigError(
                f"the loss function {_name(function)} has the parameters {', '.join(each.name for each in parameters)}; each must have "
                f"a default or be one of {', '.join(known)}, which are passed by name"
            )

    def compute(self, logits: Tensor, batch: Batch, *, shared: SharedContext | None = None) -> tuple[Tensor, Stats]:
        columns = {name: self._column(name, batch) for name in COLUMNS}
        named = {**batch, **{name: column for name, column in columns.items() if column is not None}}
        arguments = {"logits": logits, "batch": named, **columns}
        missing = [name for name in self.required if arguments[name] is None]
        if missing:
            raise DataError(
                f"the loss function {_name(self.function)} needs {', '.join(missing)}, which this batch does not have"
            )
        result = self.function(**{name: arguments[name] for name in self._takes if arguments[name] is not None})
        loss, stats = result if isinstance(result, tuple) else (result, {})
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigTypeError(f"the loss function {_name(self.function)} returned {shape}; it must return a scalar tensor")
        stats = with_reported_loss(loss, stats)
        loss = loss.reshape(()) / ranks.world_size()
        return loss, {**stats, "loss": loss.detach()}

    @staticmethod
    def _column(name: str, batch: Batch) -> Any:
        return batch[name] if name in batch else batch.get(COLUMNS[name])


def _name(function: Callable[..., Any]) -> str:
    return function.__name__ if inspect.isroutine(function) else type(function).__name__
