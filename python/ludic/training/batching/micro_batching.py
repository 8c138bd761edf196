"""Samples to micro-batches: cut, pack, pad. The work is done by `ludic._core`; here are the items
and the tensors.

`mini_batches` plans what the trainer runs; these functions are the parts, and the whole for code
that has a loop of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludic import _core
from ludic.errors import ConfigError, DataError
from ludic.training.config import check_budget
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWItem


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the model together.

    >>> MicroBatch({"input_ids": ids_BT, "attention_mask": ..., "action_mask": ..., "weight": weight_B}, num_items=4)
    """

    tensors: dict[str, Any]
    """Padded `[B, T]`, or padding-free `[1, S]` with `cu_seqlens` `[B + 1]` and `max_seqlen`, an
    `int`. Where samples share a row, `turns` `[N, 3]` has the row, begin and end of each.
    Preference samples have a `meta` beside their tensors."""
    num_items: int
    """N: samples, as many as rows unless some share one."""
    sample_names: tuple[str, ...] = ()
    """`rollout_id/step_index` of each sample, for error messages; may be empty."""

    def parts(self) -> Iterator[MicroBatch]:
        """The least that a loss can be computed on, one after another: here each sample alone."""
        return (self.row(index) for index in range(self.num_items))

    def row(self, index: int) -> MicroBatch:
        """The sample at `index` alone."""
        names = self.sample_names[index : index + 1]
        if "turns" not in self.tensors:
            return MicroBatch(_row(self.tensors, index, index), 1, names)
        row, begin, end = self.tensors["turns"][index].tolist()
        alone = _row({name: value for name, value in self.tensors.items() if name != "turns"}, row, index)
        mask = alone["action_mask"].clone()
        mask[:, :begin], mask[:, end:] = 0.0, 0.0
        turns = self.tensors["turns"].new_tensor([[0, begin, end]])
        return MicroBatch({**alone, "action_mask": mask, "turns": turns}, 1, names)


def _row(tensors: Mapping[str, Any], row: int, sample: int) -> dict[str, Any]:
    """One row of what has a value a token, one sample of what has a value a sample."""
    if "cu_seqlens" not in tensors:
        return {name: value[row : row + 1] if value.ndim == 2 else value[sample : sample + 1] for name, value in tensors.items()}
    bounds = tensors["cu_seqlens"]
    start, end = int(bounds[row]), int(bounds[row + 1])
    alone = {
        name: value[:, start:end] if value.ndim == 2 else value[sample : sample + 1]
        for name, value in tensors.items()
        if name not in ("cu_seqlens", "max_seqlen")
    }
    return {**alone, "cu_seqlens": bounds.new_tensor([0, end - start]), "max_seqlen": end - start}


def to_tensors(columns: Mapping[str, NDArray[Any] | int], device: torch.device | str) -> dict[str, Any]:
    """The core's arrays as tensors that share their memory, moved to `device` if that is another
    one; a count stays an `int`."""
    on_cpu = torch.device(device).type == "cpu"

    def converted(column: NDArray[Any] | int) -> Tensor | int:
        if isinstance(column, int):
            return column
        tensor = torch.from_numpy(column)
        return tensor if on_cpu else tensor.to(device, non_blocking=True)

    return {name: converted(column) for name, column in columns.items()}


def collate_saw_items(items: Sequence[SAWItem], *, pad_token_id: int, device: torch.device | str) -> dict[str, Tensor]:
    """Right-padded `input_ids`, `attention_mask` int64, `action_mask` float32 `[B, T]`, `weight`
    float32 `[B]`.

    If the items carry log-probs, also `actor_logps` float32 `[B, T]`, 0 off the actions, and
    `old_logp_action` `[B]`, their sums. Some with and some without is a `DataError`, as is another
    number of them than of action tokens.
    """
    if not items:
        raise DataError("cannot collate an empty list of items")
    table = _core.SampleTable.from_items(items)
    return to_tensors(table.collate(np.arange(len(items)), pad_token_id), device)


def truncate_item(item: SAWItem, max_seq_len: int) -> SAWItem:
    """The item cut on the right to `max_seq_len` tokens, its metadata saying so; the same object
    if it is short enough."""
    total = len(item.input_ids)
    _check_masks(item, total)
    if total <= max_seq_len:
        return item
    mask = item.action_mask[:max_seq_len]
    return replace(
        item,
        input_ids=item.input_ids[:max_seq_len],
        attention_mask=item.attention_mask[:max_seq_len],
        action_mask=mask,
        meta=_truncated_meta(item.meta, total, max_seq_len, int(sum(mask))),
        attachments=_truncated_attachments(item.attachments, int(sum(mask))),
    )


_truncate_item = truncate_item


def cut_item(item: SAWItem, max_seq_len: int) -> SAWItem:
    """`truncate_item`, with `seq_len_truncated` in the metadata whether it was cut or not. The
    item itself is left as it is."""
    cut = truncate_item(item, max_seq_len)
    return cut if "seq_len_truncated" in cut.meta else replace(cut, meta={**cut.meta, "seq_len_truncated": False})


def _check_masks(item: SAWItem, total: int) -> None:
    for name in ("attention_mask", "action_mask"):
        length = len(getattr(item, name))
        if length != total:
            raise DataError(f"{name} has {length} entries, input_ids has {total}; they must have the same length")


def _truncated_meta(meta: Mapping[str, Any], total: int, kept: int, actions: int) -> dict[str, Any]:
    cut = {
        **meta,
        "seq_len_truncated": True,
        "seq_len_original": total,
        "seq_len_retained": kept,
        "seq_len_retained_frac": kept / total,
        "truncated": True,
    }
    if cut.get("truncation_reason") is None:
        cut["truncation_reason"] = "max_seq_len"
    if "completion_length" in cut:
        cut["completion_length"] = actions
    if "prompt_length" in cut:
        cut["prompt_length"] = kept - actions
    return cut


def _truncated_attachments(attachments: SampleAttachments, actions: int) -> SampleAttachments:
    logps = attachments.actor_logps
    if logps is None:
        return attachments
    return replace(attachments, actor_logps=ActorTokenLogps(logps.token_logps[:actions]))


def split_items_by_token_budget(items: Sequence[SAWItem], *, micro_token_budget: int, max_seq_len: int) -> list[list[SAWItem]]:
    """Greedy micro-batches: cut to `max_seq_len`, sort by length (stable), open a new one when
    `longest * rows` would exceed the budget."""
    check_limits(micro_token_budget, max_seq_len)
    if not items:
        return []
    cut = [truncate_item(item, max_seq_len) for item in items]
    lengths = np.fromiter((len(item.input_ids) for item in cut), dtype=np.int32, count=len(cut))
    plan = _core.plan_greedy(lengths, micro_token_budget)
    return [[cut[index] for index in indices] for indices in plan.to_lists()]


def collate_micro_batches(
    items: Sequence[SAWItem],
    *,
    pad_token_id: int,
    device: torch.device | str,
    micro_token_budget: int,
    max_seq_len: int,
) -> list[MicroBatch]:
    """`split_items_by_token_budget`, collated. The items are read once."""
    check_limits(micro_token_budget, max_seq_len)
    if not items:
        return []
    table = _core.SampleTable.from_items(items).truncate(max_seq_len)
    plan = _core.plan_greedy(table.lengths, micro_token_budget)
    collated = ((table.collate(plan[k], pad_token_id), len(plan[k])) for k in range(len(plan)))
    return [MicroBatch(to_tensors(columns, device), rows) for columns, rows in collated]


def check_limits(micro_token_budget: int, max_seq_len: int) -> None:
    """Raise ConfigError unless both are positive, and BudgetError unless a sample of full length
    fits."""
    for name, value in (("micro_token_budget", micro_token_budget), ("max_seq_len", max_seq_len)):
        if value <= 0:
            raise ConfigError(f"{name} ({value}) must be > 0")
    check_budget(micro_token_budget, max_seq_len)
