"""FlexAttention over a row of prefix trees: who may look at whom, as one interval per token.

The branches of a row are in the order of a depth-first walk, so the tokens that a token precedes in
its samples are the next ones of the row, up to where a branch leaves its path. For the samples
[1 2 3 4] and [1 2 5] of `prefix_trees`:

    the row  1 2 3 4 5   places  0 1 2 3 4   ends  5 5 4 4 5

Token k is seen by the tokens q with k <= q < ends[k]: 2 by all behind it, 3 by itself and 4.

Shapes: U tokens of the row, P the row padded to whole blocks, H heads, D width of a head. A padding
token sees itself alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Ints = NDArray[np.int64]
BLOCK = 128
"""Queries, and keys, of a block of FlexAttention's mask."""
LEAST_BLOCKS = 2
"""A row is padded to this many at least: torch would compile a kernel of its own for one block."""
UNSUPPORTED = ("position_bias", "s_aux")
"""Options of attention functions that are not passed on to FlexAttention."""


def find_ends(lengths: Ints, shared: Ints) -> Ints:
    """[U] for each token of the row the place behind the last token that sees it. `lengths` and
    `shared` [N]: tokens of each sample, and how many of them it shares with the one before it."""
    own = lengths - shared
    begins = own.cumsum() - own
    ends = np.empty(int(own.sum()), dtype=np.int64)
    until = np.full(int(lengths.max(initial=0)), len(ends))  # by depth, for the samples that follow
    for begin, length, common in zip(begins[::-1], lengths[::-1], shared[::-1], strict=True):
        ends[begin : begin + length - common] = until[common:length]
        until[common:] = begin
    return ends


class PrefixIntervals:
    """The attention of a row of trees."""

    def __init__(self, ends: Ints, positions: Ints, device: torch.device | str) -> None:
        """`ends` [U] of `find_ends`; `positions` [U] of each token in its samples."""
        blocks = max(LEAST_BLOCKS, -(-len(ends) // BLOCK))
        self._padding = blocks * BLOCK - len(ends)
        alone = np.arange(len(ends), blocks * BLOCK)
        self._ends = np.concatenate([ends, alone + 1])
        self._positions = np.concatenate([positions, np.zeros_like(alone)])
        self._device = device
        self._masks: dict[int | None, BlockMask] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, window: int | None = None, **options: Any) -> Tensor:
        """[1, U, H, D] from `query` [1, H, U, D] and `key`, `value` [1, H_kv, U, D]. `window`: a
        token sees at most so many, itself included. Options: `scaling`, `softcap` as in
        transformers. Raises ValueError for options that FlexAttention does not support."""
        given = [name for name in UNSUPPORTED if options.get(name) is not None]
        given += ["dropout"] if options.get("dropout") else []
        if given:
            raise ValueError(f"FlexAttention over prefix trees supports no {', '.join(given)}")
        softcap = options.get("softcap")
        padded = (F.pad(tensor, (0, 0, 0, self._padding)) for tensor in (query, key, value))
        attended: Tensor = _flex_attention(query.device.type)(
            *padded,
            score_mod=None if softcap is None else _make_cap(softcap),
            block_mask=self.mask(window),
            scale=options.get("scaling"),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended[:, :, : query.shape[2]].transpose(1, 2)

    def mask(self, window: int | None = None) -> BlockMask:
        """The mask of P queries and P keys."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> BlockMask:
        some, every = self._find_blocks(window)
        partial, full = (_list_blocks(blocks, self._device) for blocks in (some & ~every, every))
        ends, positions = (torch.from_numpy(array.astype(np.int32)).to(self._device) for array in (self._ends, self._positions))

        def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = (query >= key) & (query < ends[key])
            return seen if window is None else seen & (positions[query] - positions[key] < window)

        size = len(self._ends)
        return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=is_seen, seq_lengths=(size, size))

    def _find_blocks(self, window: int | None) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """[P / 128, P / 128] whether some query of a block may see some key of the other, and
        whether each sees each."""
        first = np.arange(0, len(self._ends), BLOCK)
        last = first + BLOCK - 1
        ends, positions = (array.reshape(-1, BLOCK) for array in (self._ends, self._positions))
        some = (last[:, None] >= first) & (first[:, None] < ends.max(1))
        every = (first[:, None] >= last) & (last[:, None] < ends.min(1))
        if window is not None:
            some &= positions.min(1)[:, None] - positions.max(1) < window
            every &= positions.max(1)[:, None] - positions.min(1) < window
        return some, every


def _list_blocks(blocks: NDArray[np.bool_], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """The number of blocks of keys for each block of queries, and their indices first: [1, 1, Q]
    and [1, 1, Q, K], int32."""
    counts = blocks.sum(1, dtype=np.int32)
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts[None, None]).to(device), torch.from_numpy(order[None, None]).to(device)


def _make_cap(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@cache
def _flex_attention(kind: str) -> Callable[..., Any]:
    """Compiled once for rows of all lengths. On a CPU as it is: torch has no gradient there."""
    attend: Callable[..., Any] = flex_attention
    return attend if kind == "cpu" else torch.compile(attend, dynamic=True)
