"""Attention of rows that share prompts: the queries of all rows of a group read one copy of the
prompt's keys and values, and each query the columns of its own row.

Each part gives a softmax's numerator and denominator, which are added up with a common maximum
(Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; the split by prefix is
Athiwaratkun et al., Bifurcated Attention, 2024). The result is the attention over all columns up to
rounding in float32.

It is an attention function of transformers, which a model uses inside `shareable_attention`. It
shares only in a `RowCache` that was made with `share=True`; every other call goes on to `sdpa`.

Shapes: N rows, R distinct prompts, M rows of the largest group, H key-value heads, Q query heads
of each, P columns of a prompt, S columns of a row without its prompt, D size of a head.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ludic.inference.local.row_cache import RowLayer, written
from ludic.models.packed_attention import OWN

NAME = "ludic_shared_prompts"
IGNORED = {"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "logits_to_keep"}
"""Keywords of an attention function that change nothing for one new token in evaluation mode."""


@dataclass
class Reads:
    """What the attention of a forward pass read."""

    tensors: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and values of each call."""
    is_plain: bool = True
    """Whether every call was softmax attention with nothing but a mask and a scale."""

    def are_of(self, cache: Any) -> bool:
        """Whether each layer's keys and values were read once, as the cache returned them, by plain
        attention."""
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
        return (
            self.is_plain
            and len(pairs) == len(self.tensors)
            and all(a is b and c is d for (a, c), (b, d) in zip(self.tensors, pairs, strict=True))
        )


class _Recording(threading.local):
    reads: Reads | None = None


_recording = _Recording()


@contextmanager
def record_reads() -> Iterator[Reads]:
    """Record what the attention of this thread reads inside."""
    _recording.reads = reads = Reads()
    try:
        yield reads
    finally:
        _recording.reads = None


@contextmanager
def shareable_attention(model: Any) -> Iterator[bool]:
    """Let the model's attention share prompts inside, if it is `sdpa` through transformers'
    interface, or ludic's own, which is `sdpa` for such rows, and in float32. Yields whether it
    does. What is sampled does not depend on when a trainer sets its attention."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config: Any = getattr(inner, "config", None)
    before = getattr(config, "_attn_implementation", None)
    can = (
        before in ("sdpa", *OWN)
        and getattr(inner, "_supports_attention_backend", False) is True
        and not hasattr(inner, "_orig_mod")
        and all(p.dtype is torch.float32 for p in inner.parameters())
    )
    if not can:
        yield False
        return
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    config._attn_implementation = NAME
    try:
        yield True
    finally:
        config._attn_implementation = before
        written.layer = None


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers: output [N, 1, H * Q, D]."""
    reads, layer = _recording.reads, written.layer
    if reads is not None:
        reads.tensors.append((key, value))
        reads.is_plain &= _is_plain(query, attention_mask, keywords)
    if layer is None or key is not layer.keys or value is not layer.values:
        output: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **keywords)
        return output
    layer.is_unread = False
    scaling = keywords.get("scaling")
    return attend_rows(query, layer, attention_mask, query.shape[-1] ** -0.5 if scaling is None else scaling), None


def _is_plain(query: Tensor, mask: Tensor | None, keywords: dict[str, Any]) -> bool:
    extra = [name for name, value in keywords.items() if value is not None and value is not False and name not in IGNORED]
    return set(extra) <= {"scaling"} and (mask is None or mask.shape[1] == 1) and query.dtype is torch.float32


def attend_rows(query: Tensor, layer: RowLayer, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of one new token of each row: query [N, H * Q, 1, D] gives [N, 1, H * Q, D].

    The mask is [N, 1, 1, P + S] or [1, 1, 1, P + S], True or 0 where a column is read.
    """
    assert layer.prompt is not None
    assert layer.groups is not None
    rows, heads, _, size = query.shape
    keys, values = layer.prompt
    num_prompts, key_heads, length, _ = keys.shape
    row_of_slot, slot_of_row = layer.groups.row_of_slot, layer.groups.slot_of_row
    most, per_head = len(row_of_slot) // num_prompts, heads // key_heads
    query_NHQD = query.reshape(rows, key_heads, per_head, size) * scale
    # index_select copies rows, six times as fast as an index of the same rows
    grouped = query_NHQD.index_select(0, row_of_slot).view(num_prompts, most, key_heads, per_head, size).transpose(1, 2)
    of_prompts = of_rows = None
    if mask is not None:  # the columns of the prompts, of one row of each prompt, and the rows' own columns
        of_prompts, of_rows = mask[..., :length], mask[..., length:]
        of_prompts = of_prompts if len(mask) == 1 else of_prompts[row_of_slot[::most]]
    parts = _attend_part(grouped.reshape(num_prompts, key_heads, most * per_head, size), keys, values, of_prompts)
    first = [  # [R, H, M * Q, *] -> [N, H, Q, *]
        part.view(num_prompts, key_heads, most, per_head, -1)
        .transpose(1, 2)
        .reshape(-1, key_heads, per_head, part.shape[-1])
        .index_select(0, slot_of_row)
        for part in parts
    ]
    return _join(first, _attend_part(query_NHQD, layer.keys, layer.values, of_rows)).reshape(rows, 1, heads, size)


def _attend_part(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Numerator [..., D], denominator [..., 1] and maximum [..., 1] of the softmax over these
    columns."""
    scores = query @ keys.transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    most = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(most).exp_()
    return [weights @ values, weights.sum(dim=-1, keepdim=True), most]


def _join(first: list[Tensor], second: list[Tensor]) -> Tensor:
    most = torch.maximum(first[2], second[2])
    a, b = (first[2] - most).exp_(), (second[2] - most).exp_()
    return (first[0] * a + second[0] * b) / (first[1] * a + second[1] * b)
