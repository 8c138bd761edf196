"""Batches by column, as micro-batches.

    input_ids        5 6 7 0        rows by attention mask:  [5 6 7], [8 9]
    attention_mask   1 1 1 0        rows by cu_seqlens [0 3 5] of the packed 5 6 7 8 9: the same
                     ...
Rows become a `SampleTable`, which checks them; a micro-batch is collated from it. Columns that a
table does not have (advantages of tokens, log-probabilities of a reference) follow their rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludic import _core
from ludic.errors import ConfigError, ConfigTypeError, DataError
from ludic.rollouts.training.rl_losses import GRPO_LOSS, IGNORED, SFT_LOSS, PPOLoss, grpo_loss, ppo_loss, sft_loss, sum_of_means
from ludic.training import ranks
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.packing import MicroBatch, Rows
from ludic.training.batching.token_columns import FRACTIONS
from ludic.training.config import TrainerConfig
from ludic.training.loss.base import Loss, as_loss, with_reported_loss
from ludic.training.loss.batch import Batch, Stats
from ludic.training.loss.context import SharedContext
from ludic.training.types import TOKEN_WEIGHT, SAWItem


@dataclass(frozen=True)
class ColumnRows:
    """The rows of a batch by column, without padding. N rows, S tokens in all."""

    places: Tensor
    """[S] index of each token in the flattened `input_ids`."""
    ends: Tensor
    """[N] end of each row in `places`."""
    shape: tuple[int, int]
    """Shape of `input_ids`."""
    table: _core.SampleTable
    """The rows, with the token columns `token_weight` and `ref_log_probs` if the batch has them,
    and the loss mask as `action_fractions` if it has other values than 0 and 1."""
    old_logp_mean: Tensor | None
    """[N] `old_log_probs` of one value a row."""

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> ColumnRows:
        """Read a batch. Raises DataError for columns whose shapes or values do not fit."""
        ids = _require(batch, "input_ids").cpu()
        if ids.ndim != 2:
            raise DataError(f"input_ids {tuple(ids.shape)} must be [B, T], or [1, S] with cu_seqlens")
        places, ends = _find_rows(batch, ids)
        advantages, old = _optional(batch, "advantages"), _optional(batch, "old_log_probs")
        weights = torch.ones(len(ends)) if advantages is None or advantages.shape == ids.shape else advantages
        _check_rows("advantages", weights, len(ends))
        mask = read_loss_mask(batch, ids).float()
        if not bool((mask.isfinite() & (mask >= 0)).all()):
            row, token = (int(index) for index in (~(mask.isfinite() & (mask >= 0))).nonzero()[0])
            raise DataError(f"loss_mask[{row}, {token}] ({float(mask[row, token])}) must be a finite number of at least 0")
        per_token = None if old is None or old.ndim == 1 else _check_tokens("old_log_probs", old, ids)
        table = _core.SampleTable.from_columns(
            ids.reshape(-1)[places].numpy(),
            (mask != 0).reshape(-1)[places].to(torch.uint8).numpy(),
            np.concatenate([[0], ends.numpy()]),
            weights.float().numpy(),
            None if per_token is None else per_token.reshape(-1)[places].float().numpy(),
        )
        columns = {
            "ref_log_probs": _optional(batch, "ref_log_probs"),
            TOKEN_WEIGHT: None if weights is advantages else advantages,
            FRACTIONS: None if bool(((mask == 0) | (mask == 1)).all()) else mask,
        }
        actions = places[mask.reshape(-1)[places] != 0]
        for name, value in columns.items():
            if value is not None:
                table = table.with_token_column(name, _check_tokens(name, value, ids).reshape(-1)[actions].float().numpy())
        means = _check_rows("old_log_probs", old, len(ends)).float() if old is not None and old.ndim == 1 else None
        return cls(places, ends, (ids.shape[0], ids.shape[1]), table, means)

    def begins(self, row: int) -> int:
        return int(self.ends[row - 1]) if row else 0

    def spread(self, logps: Mapping[int, Tensor]) -> Tensor:
        """[B, T] in the layout of `input_ids`, from row -> log-probabilities of its tokens after
        the first; 0 elsewhere."""
        flat = torch.zeros(self.shape[0] * self.shape[1])
        for row, values in logps.items():
            places = self.places[self.begins(row) + 1 : int(self.ends[row])]
            flat[places] = values[: len(places)].float().cpu()
        return flat.view(self.shape)


class ColumnMiniBatch(MiniBatch):
    """The micro-batches of a batch by column."""

    def __init__(self, rows: ColumnRows, cfg: TrainerConfig) -> None:
        self.columns = rows
        names = [SAWItem([], [], [], 0.0, {"rollout_id": f"row {number}"}) for number in range(len(rows.table))]
        super().__init__(MacroBatch(names, rows.table, 0, 0), np.arange(len(rows.table)), cfg)

    def _micro_batch(self, rows: Rows) -> MicroBatch:
        micro_batch = super()._micro_batch(rows)
        if self.columns.old_logp_mean is not None:
            mask = micro_batch.tensors["action_mask"]
            means = self.columns.old_logp_mean[torch.from_numpy(rows)].to(mask.device)
            micro_batch.tensors["old_logp_action"] = sum_of_means(means, mask)
        return micro_batch


def whole_micro_batch(batch: Mapping[str, Any], device: torch.device | str) -> MicroBatch:
    """The batch as it is, for a loss function that sees all of it: the caller's columns, and those
    that the model and a `Loss` read."""
    tensors = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    ids = _require(tensors, "input_ids")
    tensors["action_mask"] = read_loss_mask(tensors, ids).float()
    if "cu_seqlens" in tensors:
        bounds = tensors["cu_seqlens"]
        lengths = bounds.diff()
        starts = torch.repeat_interleave(bounds[:-1].long(), lengths.long())
        tensors.setdefault("position_ids", (torch.arange(ids.shape[1], device=ids.device) - starts)[None])
        tensors.setdefault("max_seqlen", int(lengths.max()))
        count = len(lengths)
    else:
        tensors.setdefault("attention_mask", torch.ones_like(ids))
        count = ids.shape[0]
    tensors.setdefault("weight", torch.ones(count, device=ids.device))
    return MicroBatch(tensors, count, tuple(f"row {number}" for number in range(count)))


def read_loss_mask(batch: Mapping[str, Any], ids: Tensor) -> Tensor:
    """[B, T] `loss_mask`, 0 on ignored labels and on padding. Raises DataError for labels that are
    shifted or otherwise no labels of `input_ids`."""
    labels, mask = _optional(batch, "labels"), _optional(batch, "loss_mask")
    result = torch.ones_like(ids) if mask is None else _check_tokens("loss_mask", mask.to(ids.device), ids)
    attention = _optional(batch, "attention_mask")
    if attention is not None and attention.shape == ids.shape:
        result = result.masked_fill(attention.to(ids.device) == 0, 0)
    if labels is None:
        return result
    labels = _check_tokens("labels", labels.to(ids.device), ids)
    differs = (labels != ids) & (labels != IGNORED) & (result != 0)
    if bool(differs.any()):
        row, token = (int(index) for index in differs.nonzero()[0])
        raise DataError(f"labels[{row}, {token}] is {labels[row, token]}; it must be {IGNORED} or {ids[row, token]}, not shifted")
    return result.masked_fill(labels == IGNORED, 0)


def _find_rows(batch: Mapping[str, Any], ids: Tensor) -> tuple[Tensor, Tensor]:
    """`places` and `ends` of the rows."""
    if "cu_seqlens" in batch:
        bounds = _require(batch, "cu_seqlens").cpu().long()
        if ids.shape[0] != 1 or bounds[0] != 0 or bounds[-1] != ids.shape[1] or bool((bounds.diff() < 1).any()):
            raise DataError(f"cu_seqlens {bounds.tolist()[:8]} must rise from 0 to S, and input_ids {list(ids.shape)} be [1, S]")
        return torch.arange(ids.shape[1]), bounds[1:]
    attention = _optional(batch, "attention_mask")
    present = torch.ones_like(ids) if attention is None else _check_tokens("attention_mask", attention, ids)
    places = present.reshape(-1).nonzero()[:, 0]
    lengths = (present != 0).sum(dim=1)
    if bool((lengths == 0).any()):
        raise DataError(f"row {int((lengths == 0).nonzero()[0])} of attention_mask has no token; leave the row out")
    return places, lengths.cumsum(0)


def _require(batch: Mapping[str, Any], name: str) -> Tensor:
    value = batch.get(name)
    if not isinstance(value, Tensor):
        raise DataError(f"the batch has {', '.join(batch) or 'no columns'}; it needs {name} as a tensor")
    return value


def _optional(batch: Mapping[str, Any], name: str) -> Tensor | None:
    return _require(batch, name).detach() if batch.get(name) is not None else None


def _check_tokens(name: str, value: Tensor, ids: Tensor) -> Tensor:
    if value.shape != ids.shape:
        raise DataError(f"{name} {tuple(value.shape)} must have the shape of input_ids {tuple(ids.shape)}")
    return value.to(ids.device)


def _check_rows(name: str, value: Tensor, count: int) -> Tensor:
    if tuple(value.shape) != (count,):
        raise DataError(f"{name} {tuple(value.shape)} must have one value for each of {count} rows, or one for each token")
    return value.cpu()


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
    optimizer step whole, since it is not known how its value would add up over parts. On several
    ranks the mean over ranks is trained.
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
                f"parameters of {_name(function)} ({', '.join(map(str, parameters))}) must be {', '.join(known)}, or have defaults"
            )

    def compute(self, logits: Tensor, batch: Batch, *, shared: SharedContext | None = None) -> tuple[Tensor, Stats]:
        columns = {name: batch[name] if name in batch else batch.get(ours) for name, ours in COLUMNS.items()}
        named = {**batch, **{name: column for name, column in columns.items() if column is not None}}
        arguments = {"logits": logits, "batch": named, **columns}
        missing = [name for name in self.required if arguments[name] is None]
        if missing:
            raise DataError(f"the loss function {_name(self.function)} needs {', '.join(missing)}; this batch has none")
        result = self.function(**{name: arguments[name] for name in self._takes if arguments[name] is not None})
        loss, stats = result if isinstance(result, tuple) else (result, {})
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigTypeError(f"the loss function {_name(self.function)} returned {shape}; it must return a scalar tensor")
        stats = with_reported_loss(loss, stats)
        loss = loss.reshape(()) / ranks.world_size()
        return loss, {**stats, "loss": loss.detach()}


def _name(function: Callable[..., Any]) -> str:
    return function.__name__ if inspect.isroutine(function) else type(function).__name__
