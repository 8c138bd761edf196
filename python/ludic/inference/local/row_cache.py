"""The cache of a batch that is decoded: tokens are appended in place, rows leave without a copy of
those that stay, and rows with one prompt read one copy of its keys and values.

Attention of rows that share prompts: the queries of all rows of a group read the copy of the
prompt's keys and values, and each query the columns of its own row. Each part gives a softmax's
numerator and denominator, which are added up with a common maximum (Milakov and Gimelshein, Online
normalizer calculation for softmax, 2018; the split by prefix is Athiwaratkun et al., Bifurcated
Attention, 2024). The result is the attention over all columns up to rounding in float32.

It is an attention function of transformers, which a model uses inside `shareable_attention`. It
shares only in a `RowCache` that was made with `share=True`; every other call goes on to `sdpa`.

Shapes: N rows, R distinct prompts, M rows of the largest group, H key-value heads, Q query heads
of each, P columns of a prompt, S columns of a row without its shared prompt, T columns with it,
D size of a head.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ludic.models.packed_attention import OWN
from ludic.models.wrappers import find_text_config

LEAST_COLUMNS = 16
"""Columns that a new buffer has room for."""


class _Written(threading.local):
    layer: RowLayer | None = None
    """The last layer with shared prompts that a model wrote to in this thread."""


written = _Written()


@dataclass
class Groups:
    """Which rows share a prompt. Prompts [a, b] of rows a, b, a: slots 0, 2, 1 of [a, a, b, -]."""

    row_of_slot: Tensor
    """[R * M] int64: the rows of each prompt; 0 where a prompt has fewer than M rows."""
    slot_of_row: Tensor
    """[N] int64"""

    @classmethod
    def of(cls, prompt_of_row: Tensor, prompts: int) -> Groups:
        """`prompt_of_row` [N] are indices below `prompts`, which is R."""
        counts, rows = (
            torch.bincount(prompt_of_row, minlength=prompts),
            torch.arange(len(prompt_of_row), device=prompt_of_row.device),
        )
        order = prompt_of_row.argsort(stable=True)
        places = rows - (counts.cumsum(0) - counts)[prompt_of_row[order]]
        most = int(counts.max())
        slot_of_row = torch.empty_like(rows)
        slot_of_row[order] = prompt_of_row[order] * most + places
        row_of_slot = rows.new_zeros(prompts * most)
        row_of_slot[slot_of_row] = rows
        return cls(row_of_slot, slot_of_row)


class RowLayer(DynamicLayer):  # type: ignore[misc, unused-ignore]
    """One layer of a `RowCache`: the columns of each row, without a shared prompt."""

    def __init__(self, keys: Tensor, values: Tensor, *, rows: Tensor, limit: int, groups: Groups | None) -> None:
        """From prompts [R, H, P, D] and the prompt of each row [N]. At most `limit` columns follow.
        With `groups` rows share their prompts; otherwise each has a copy."""
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.prompt = None if groups is None else (keys, values)
        self.groups = groups
        self.length = 0 if groups else keys.shape[2]
        self._limit = self.length + limit
        if groups is None:
            self._buffers = [self._make_buffer(part, 0, rows) for part in (keys, values)]
        else:
            self._buffers = [part.new_empty(len(rows), part.shape[1], 0, part.shape[3]) for part in (keys, values)]
        self._allocated_rows = len(rows)
        self.is_unread = False
        """Whether no attention has read what was written last."""
        self._show()

    def _make_buffer(self, part: Tensor, new: int, rows: Tensor | None = None) -> Tensor:
        """The first columns of these rows, with room for `new` more and for as many as are used."""
        columns = max(self.length + new, min(self._limit, self.length + max(self.length, LEAST_COLUMNS)))
        used = part[:, :, : self.length] if rows is None else part[rows, :, : self.length]
        buffer = used.new_empty(used.shape[0], used.shape[1], columns, used.shape[3])
        buffer[:, :, : self.length] = used
        return buffer

    def _rebuild(self, new: int) -> None:
        for i in range(2):
            self._buffers[i] = self._make_buffer(self._buffers[i], new)
        self._allocated_rows = len(self._buffers[0])

    def _show(self) -> None:
        self.keys, self.values = (buffer[:, :, : self.length] for buffer in self._buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append columns. Returns the columns of each row [N, H, S, D], without a shared prompt."""
        new = key_states.shape[2]
        if self.length + new > self._buffers[0].shape[2]:
            self._rebuild(new)
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : self.length + new] = states
        self.length += new
        self._show()
        if self.groups is not None:
            self.is_unread, written.layer = True, self
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Columns of a row, its prompt included."""
        return self.length + (0 if self.prompt is None else self.prompt[0].shape[2])

    @property
    def room(self) -> int:
        """Columns that may still come."""
        return self._limit - self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def read_rows(self, rows: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of these rows, whose prompts are `prompts`: [rows, H, T,
        D] each."""
        own = self.keys[rows], self.values[rows]
        if self.prompt is None:
            return own
        return torch.cat([self.prompt[0][prompts], own[0]], dim=2), torch.cat([self.prompt[1][prompts], own[1]], dim=2)

    def move_rows(self, sources: Tensor, targets: Tensor, count: int) -> None:
        """Copy rows `sources` over rows `targets`, and keep the first `count`."""
        for part in (self.keys, self.values):
            part[targets] = part[sources]
        self._buffers = [buffer[:count] for buffer in self._buffers]
        if 2 * count <= self._allocated_rows:
            self._rebuild(0)
        self._show()


class RowCache(DynamicCache):  # type: ignore[misc, unused-ignore]
    """The layers of N rows."""

    def __init__(self, cache: Any, prompt_of_row: Tensor, *, limit: int, share: bool) -> None:
        """From the cache of R prompts, which is emptied, and the prompt of each row [N] int64. At
        most `limit` columns follow."""
        super().__init__()
        self.prompt_of_row, self.num_prompts, self.shares = prompt_of_row, len(cache.layers[0].keys), share
        groups = self._group() if share else None
        for layer in cache.layers:
            self.layers.append(RowLayer(layer.keys, layer.values, rows=prompt_of_row, limit=limit, groups=groups))
            layer.keys = layer.values = None  # so that one layer at a time exists twice

    def _group(self) -> Groups:
        return Groups.of(self.prompt_of_row, self.num_prompts)

    def has_unread_columns(self) -> bool:
        """Whether a pass has written to layers that share prompts, and its attention has not read
        the prompts."""
        return any(layer.is_unread for layer in self.layers)

    def unshare(self, length: int) -> None:
        """Give each row a copy of its prompt, and keep the first `length` columns."""
        rows = torch.arange(len(self.prompt_of_row), device=self.prompt_of_row.device)
        for i, layer in enumerate(self.layers):
            room = layer.room + layer.get_seq_length() - length
            keys, values = (part[:, :, :length] for part in layer.read_rows(rows, self.prompt_of_row))
            self.layers[i] = RowLayer(keys, values, rows=rows, limit=room, groups=None)
        self.shares, written.layer = False, None

    def nbytes_of_rows(self, rows: int) -> int:
        """Bytes of `read_rows` for this number of rows."""
        return sum(
            2 * rows * layer.keys.shape[1] * layer.get_seq_length() * layer.keys.shape[3] * layer.keys.element_size()
            for layer in self.layers
        )

    def read_rows(self, rows: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Copies of the keys and values of these rows, for each layer [rows, H, T, D]."""
        prompts = self.prompt_of_row[rows]
        return tuple(layer.read_rows(rows, prompts) for layer in self.layers)

    def keep(self, alive: Tensor) -> Tensor:
        """Keep the rows that are True in `alive` [N]. Returns their former numbers, in their new
        order: the last rows move to the places of those that leave.

        alive [T, F, F, T, T] gives [0, 4, 3] or [0, 3, 4].
        """
        count = int(alive.sum())
        order = torch.arange(len(alive), device=alive.device)
        targets = (~alive[:count]).nonzero().squeeze(1)
        sources = count + alive[count:].nonzero().squeeze(1)
        order[targets] = sources
        order = order[:count]
        for layer in self.layers:
            layer.move_rows(sources, targets, count)
        self.prompt_of_row = self.prompt_of_row[order]
        if self.shares:
            self._drop_unused_prompts()
        return order

    def _drop_unused_prompts(self) -> None:
        used, renumbered = self.prompt_of_row.unique(return_inverse=True)
        if len(used) * 4 <= self.num_prompts * 3:
            self.prompt_of_row, self.num_prompts = renumbered, len(used)
            for layer in self.layers:
                layer.prompt = (layer.prompt[0][used], layer.prompt[1][used])
        groups = self._group()
        for layer in self.layers:
            layer.groups = groups

    def batch_select_indices(self, indices: Tensor) -> None:
        raise NotImplementedError("rows of a RowCache are chosen with `keep`")


SHARED_PROMPTS = "ludic_shared_prompts"
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
    does. Sampled tokens do not depend on when a trainer sets its attention."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = find_text_config(model)  # not of a vision tower
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
    ALL_ATTENTION_FUNCTIONS.register(SHARED_PROMPTS, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(SHARED_PROMPTS, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    config._attn_implementation = SHARED_PROMPTS
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
