"""Collation of samples into padded and padding-free batches: the core compared with plain torch,
numpy and the collators of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from benches.python import reference
from benches.python.contest import Contender, Contest
from benches.python.samples import PAD, list_items, micro_batches, over_batches, with_arrays
from numpy.typing import NDArray
from torch import Tensor
from transformers import DataCollatorWithFlattening, DataCollatorWithPadding

from ludic import _core
from ludic.models.byte_tokenizer import make_byte_tokenizer
from ludic.training.batching.packing import collate_micro_batches, collate_saw_items
from ludic.training.types import SAWItem

BUDGET = 16384


def assert_same(got: dict[str, Any], want: dict[str, Tensor]) -> None:
    """Equal bit for bit, except for the sums of log-probs, which are added in another order."""
    for name, tensor in want.items():
        tolerance = 1e-5 if name == "old_logp_action" else 0.0
        np.testing.assert_allclose(np.asarray(got[name]), tensor.numpy(), rtol=tolerance, atol=0, err_msg=name)


def assert_same_ids(got: dict[str, Any], want: dict[str, Tensor]) -> None:
    """For collators without action masks."""
    np.testing.assert_array_equal(np.asarray(got["input_ids"]), want["input_ids"].numpy())


def assert_same_tokens(got: dict[str, Any], want: dict[str, Tensor]) -> None:
    """For layouts without padding."""
    is_token = want["attention_mask"] == 1
    for name in ("input_ids", "action_mask", "actor_logps"):
        if name in got:
            np.testing.assert_array_equal(np.asarray(got[name]).ravel(), want[name][is_token].numpy())


def assert_same_compact(got: dict[str, Any], want: dict[str, Tensor]) -> None:
    """For the compact layout."""
    for name in ("input_ids", "action_mask", "actor_logps"):
        np.testing.assert_array_equal(got[name], want[name].numpy())
    np.testing.assert_array_equal(got["lengths"], want["attention_mask"].sum(1).numpy())


def to_tensors(arrays: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values) for name, values in arrays.items()}


def contests(samples: int = 1000) -> Iterator[Contest]:
    items = list_items(samples)
    tokens = sum(len(item.input_ids) for item in items)
    plan = micro_batches(items, BUDGET)
    title = f"{samples} samples, {tokens} tokens, micro-batches of {BUDGET}"
    yield Contest(
        f"Collation of {title}", tokens, "token", [*_from_lists(items, plan), *_from_arrays(items, plan), *_columns(items, plan)]
    )


def _split(items: Sequence[SAWItem], plan: list[NDArray[np.int64]]) -> list[list[SAWItem]]:
    return [[items[index] for index in indices] for indices in plan]


def _from_lists(items: list[SAWItem], plan: list[NDArray[np.int64]]) -> list[Contender]:
    batches = _split(items, plan)
    features = [[{"input_ids": item.input_ids} for item in batch] for batch in batches]
    padding, flattening = _transformers_collators()

    def entry(name: str, function: Callable[[Any], Any], check: Any = assert_same, inputs: list[Any] = batches) -> Contender:
        return Contender(name, over_batches(function, inputs), check, cold=True)

    return [
        entry("reference: lists, `torch.tensor` per row", lambda batch: reference.collate(batch, PAD)),
        entry("torch `pad_sequence`", lambda batch: reference.collate_by_pad_sequence(batch, PAD)),
        entry("numpy `fromiter`", lambda batch: reference.collate_by_numpy(batch, PAD)),
        entry("transformers `DataCollatorWithPadding` (2 fields)", padding, assert_same_ids, features),
        entry("transformers `DataCollatorWithFlattening` (3 fields)", flattening, assert_same_tokens, features),
        entry("**ludic from lists**", lambda batch: collate_saw_items(batch, pad_token_id=PAD, device="cpu")),
        Contender("**ludic from lists, split and collated**", lambda: _split_and_collate(items), assert_same, cold=True),
    ]


def _split_and_collate(items: list[SAWItem]) -> dict[str, Tensor]:
    return collate_micro_batches(items, pad_token_id=PAD, device="cpu", micro_token_budget=BUDGET, max_seq_len=4096)[-1].tensors


def _transformers_collators() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    tokenizer = make_byte_tokenizer()
    tokenizer.pad_token_id = PAD
    tokenizer.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True
    return DataCollatorWithPadding(tokenizer), DataCollatorWithFlattening(return_tensors="pt")


def _from_arrays(items: list[SAWItem], plan: list[NDArray[np.int64]]) -> list[Contender]:
    wide, narrow = _split(with_arrays(items, np.int64, np.int64), plan), _split(with_arrays(items), plan)
    plain = over_batches(lambda batch: reference.collate(batch, PAD), wide)
    by_numpy = over_batches(lambda batch: reference.collate_by_numpy(batch, PAD, are_arrays=True), narrow)
    ours = over_batches(lambda batch: collate_saw_items(batch, pad_token_id=PAD, device="cpu"), narrow)
    return [
        Contender("reference on numpy arrays", plain, assert_same, cold=True),
        Contender("numpy `concatenate` on numpy arrays", by_numpy, assert_same, cold=True),
        Contender("**ludic from numpy arrays**", ours, assert_same, cold=True),
    ]


def _columns(items: list[SAWItem], plan: list[NDArray[np.int64]]) -> list[Contender]:
    table, arena = _core.SampleTable.from_items(items), _core.Arena(2)
    padded_bytes = [24 * len(rows) * int(table.lengths[rows].max()) for rows in plan]
    source, target = np.ones(max(padded_bytes), np.uint8), np.ones(max(padded_bytes), np.uint8)

    def copy(size: int) -> None:
        target[:size] = source[:size]

    def entry(name: str, function: Callable[[Any], Any], check: Any = assert_same) -> Contender:
        return Contender(name, over_batches(function, plan), check, repeats=5)

    return [
        entry("**ludic columns, padded, fresh**", lambda rows: table.collate(rows, PAD)),
        entry("**ludic columns, padded, arena**", lambda rows: table.collate(rows, PAD, arena)),
        entry("**ludic columns, padded, arena**, as tensors", lambda rows: to_tensors(table.collate(rows, PAD, arena))),
        entry("**ludic columns, padding-free, arena**", lambda rows: table.collate_padding_free(rows, arena), assert_same_tokens),
        entry("**ludic columns, compact, arena**", lambda rows: table.collate_compact(rows, PAD, arena), assert_same_compact),
        Contender("memcpy of the padded bytes", over_batches(copy, padded_bytes), repeats=5),
    ]
