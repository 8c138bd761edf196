"""The documented algorithms in plain Python and torch, as a user would write them: the reference
for the benchmarks of the core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWItem


def collate(items: Sequence[SAWItem], pad: int) -> dict[str, Tensor]:
    """A right-padded batch: a `torch.tensor` of each sequence, copied into its row of the batch."""
    shape = (len(items), max(len(item.input_ids) for item in items))
    batch = {
        "input_ids": torch.full(shape, pad, dtype=torch.long),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "action_mask": torch.zeros(shape),
        "weight": torch.tensor([item.weight for item in items]),
        "actor_logps": torch.zeros(shape),
        "old_logp_action": torch.zeros(len(items)),
    }
    for row, item in enumerate(items):
        length = len(item.input_ids)
        batch["input_ids"][row, :length] = torch.as_tensor(item.input_ids, dtype=torch.long)
        batch["attention_mask"][row, :length] = torch.as_tensor(item.attention_mask, dtype=torch.long)
        action = torch.as_tensor(item.action_mask, dtype=torch.float32)
        batch["action_mask"][row, :length] = action
        logps = torch.as_tensor(item.attachments.actor_logps.token_logps, dtype=torch.float32)  # type: ignore[union-attr]
        positions = action.nonzero(as_tuple=True)[0]
        if len(logps) != len(positions):
            raise ValueError(f"Length mismatch: {len(logps)} log-probs for {len(positions)} actions")
        batch["actor_logps"][row, positions] = logps
        batch["old_logp_action"][row] = logps.sum()
    return batch


def collate_by_pad_sequence(items: Sequence[SAWItem], pad: int) -> dict[str, Tensor]:
    """The same through `torch.nn.utils.rnn.pad_sequence`."""

    def pad_rows(values: Iterable[Any], dtype: torch.dtype, filler: float = 0.0) -> Tensor:
        return pad_sequence([torch.tensor(row, dtype=dtype) for row in values], batch_first=True, padding_value=filler)

    action = pad_rows((item.action_mask for item in items), torch.float32)
    logps = torch.zeros_like(action)
    flat = chain.from_iterable(item.attachments.actor_logps.token_logps for item in items)  # type: ignore[union-attr]
    logps[action == 1] = torch.tensor(list(flat), dtype=torch.float32)
    return {
        "input_ids": pad_rows((item.input_ids for item in items), torch.long, pad),
        "attention_mask": pad_rows((item.attention_mask for item in items), torch.long),
        "action_mask": action,
        "weight": torch.tensor([item.weight for item in items]),
        "actor_logps": logps,
        "old_logp_action": logps.sum(1),
    }


def collate_by_numpy(items: Sequence[SAWItem], pad: int, *, are_arrays: bool = False) -> dict[str, Tensor]:
    """The fastest way with numpy: the samples' values of a field behind each other, by one
    `fromiter` over lists or one `concatenate` of arrays, scattered by a mask of lengths. Lengths 3
    and 2 have the mask [[1, 1, 1], [1, 1, 0]]."""
    lengths = np.array([len(item.input_ids) for item in items])
    tokens = int(lengths.sum())
    is_token = np.arange(lengths.max()) < lengths[:, None]

    def concatenate(values: Iterable[Iterable[Any]], dtype: Any, count: int) -> Any:
        if are_arrays:
            return np.concatenate(list(values), dtype=dtype, casting="unsafe")
        return np.fromiter(chain.from_iterable(values), dtype, count)

    def scatter(values: Any, dtype: Any, filler: float = 0) -> Any:
        out = np.full(is_token.shape, filler, dtype)
        out[is_token] = values
        return out

    action = concatenate((item.action_mask for item in items), np.float32, tokens)
    logps = np.zeros(tokens, np.float32)
    token_logps = (item.attachments.actor_logps.token_logps for item in items)  # type: ignore[union-attr]
    logps[action == 1] = concatenate(token_logps, np.float32, int(action.sum()))
    padded_logps = scatter(logps, np.float32)
    batch = {
        "input_ids": scatter(concatenate((item.input_ids for item in items), np.int64, tokens), np.int64, pad),
        "attention_mask": scatter(concatenate((item.attention_mask for item in items), np.int64, tokens), np.int64),
        "action_mask": scatter(action, np.float32),
        "weight": np.array([item.weight for item in items], np.float32),
        "actor_logps": padded_logps,
        "old_logp_action": padded_logps.sum(1),
    }
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def truncate(items: Sequence[SAWItem], max_seq_len: int) -> list[SAWItem]:
    """The samples, those that are too long as copies with shorter sequences."""

    def cut(item: SAWItem) -> SAWItem:
        if len(item.input_ids) <= max_seq_len:
            return item
        action = item.action_mask[:max_seq_len]
        logps = item.attachments.actor_logps.token_logps[: sum(action)]  # type: ignore[union-attr]
        return replace(
            item,
            input_ids=item.input_ids[:max_seq_len],
            attention_mask=item.attention_mask[:max_seq_len],
            action_mask=action,
            meta={**item.meta, "seq_len_truncated": True, "seq_len_original": len(item.input_ids)},
            attachments=SampleAttachments(ActorTokenLogps(logps)),
        )

    return [cut(item) for item in items]


def are_valid_logps(values: list[Any]) -> bool:
    """Whether all values are finite numbers, checked one by one."""
    return all(isinstance(value, (int, float)) and value - value == 0 for value in values)


def value_at(record: Mapping[str, Any], path: str) -> Any:
    """The value at the end of a dotted path, or None if there is none."""
    value: Any = record
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def reduce_records(
    records: Sequence[Mapping[str, Any]], reducers: Sequence[tuple[str, str, str | None]], samples: int, rollouts: int
) -> list[float]:
    """The reduced values, by one pass over the records per reducer."""
    counts = {None: None, "samples": samples, "rollouts": rollouts}
    results = []
    for kind, path, by in reducers:
        values = [value for value in (value_at(record, path) for record in records) if value is not None]
        total = float(sum(map(bool, values)) if kind == "count_true" else sum(values))
        divisor = counts[by] if by is not None else len(values) if kind == "mean" else 1
        results.append(total / divisor if divisor else 0.0)
    return results
