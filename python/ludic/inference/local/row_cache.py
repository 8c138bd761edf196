"""The cache of a batch that is decoded: tokens are appended in place, rows leave without a copy of
those that stay, and rows with one prompt read one copy of its keys and values.

Shapes: N rows, R distinct prompts, M rows of the largest group, H key-value heads, P columns of a
prompt, S columns of a row without its shared prompt, T columns with it, D size of a head.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

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
