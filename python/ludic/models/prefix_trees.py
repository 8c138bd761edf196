"""A row of prefix trees: samples that begin alike, of which each token is computed once.

    samples  [1 2 3 4], [1 2 5]        the row  1 2 3 4 5   positions  0 1 2 3 2
                                       places   0 1 2 3 | 0 1 4

Each sample adds a **branch** to the row: the tokens that it does not share with the sample before
it. A token attends to the tokens before it in its samples: the tokens of its branch and the tokens
that the branch begins with. Above, 5 sees 1, 2 and itself. No mask of the whole row is built: the
queries of consecutive branches, a **span**, meet the keys of the span and of the path before it.
Short branches are in one span, so that the keys and values of a long prompt are not copied for each
of them: all spans together have at most 6 U keys, and with padding 8 U and 16 for each tree.

FlexAttention over such a row knows who may look at whom as one interval per token. The
branches of a row are in the order of a depth-first walk, so the tokens that a token precedes in its
samples are the next ones of the row, up to where a branch leaves its path. For the samples above:

    the row  1 2 3 4 5   places  0 1 2 3 4   ends  5 5 4 4 5

Token k is seen by the tokens q with k <= q < ends[k]: 2 by all behind it, 3 by itself and 4.

Shapes: U tokens of the row, P the row padded to whole blocks, S tokens of all samples, H heads, D
width of a head. A padding token sees itself alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

PREFIX_TREES = "prefix_trees"
"""Name of the `PrefixTrees` of a batch."""
PREFIX_FLEX = "ludic_packed_flex"
"""Name of the attention of a model that computes trees with FlexAttention."""
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SpanGroup:
    """Spans of similar size: G spans, padded to Q queries and K keys on the right.

    Example: above, [1 2 3 4] has 4 queries and 4 keys; [5] has one query and the keys 1 2 5.
    """

    queries: Tensor
    """[G, Q] the row's token at each place; a span's last one again as padding."""
    keys: Tensor
    """[G, K] the row's token at each place; U as padding, which no query sees."""
    is_causal: bool
    """Whether each span begins a tree and has one branch, so that queries and keys are the same."""

    def find_seen(self, ends: Tensor, positions: Tensor, window: int | None, tokens_ahead: Tensor | None = None) -> Tensor | None:
        """[G, 1, Q, K] which keys each query sees: the keys whose path it continues, with `window`
        only the ones fewer than `window` positions back; and `tokens_ahead` [U] of the ones behind
        it. None if causal attention says the same. `ends` and `positions` [U + 1] come from
        `Branches`.

        Above, the query 5 of the keys 1 2 5 sees [1 1 1], with a window of 2 [0 1 1]."""
        if self.is_causal and tokens_ahead is None and (window is None or self.keys.shape[1] <= window):
            return None
        queries, keys = self.queries[:, :, None], self.keys[:, None, :]
        seen = (keys <= (queries if tokens_ahead is None else queries + tokens_ahead[queries])) & (queries < ends[keys])
        if window is not None:
            seen &= positions[queries] - positions[keys] < window
        return seen[:, None]


class Branches:
    """The attention of a row of trees by sdpa."""

    def __init__(self, groups: Sequence[SpanGroup], scatter: Tensor, ends: Tensor, positions: Tensor) -> None:
        """`scatter` [U]: the place of each token of the row among the queries of all groups.
        `ends` and `positions` [U + 1]: the place behind the last token that sees a token
        (`find_ends`), and its position in its samples; the last entry belongs to padding."""
        self.groups, self._scatter, self._ends, self._positions = groups, scatter, ends, positions
        self._masks: dict[tuple[int | None, torch.dtype], list[Tensor | None]] = {}

    @classmethod
    def of_samples(cls, lengths: Ints, shared: Ints, places: Ints, device: torch.device | str) -> Branches:
        """`lengths` and `shared` [N]: tokens of each sample, and how many of them it shares with
        the one before it; `places` [S] their places in the row."""
        own = lengths - shared
        begins, starts, size = own.cumsum() - own, lengths.cumsum() - lengths, int(own.sum())
        queries, paths = [], []
        for first, last in _find_spans(lengths, shared):
            span = np.arange(begins[first], begins[last] + own[last])
            queries.append(span)
            paths.append(np.concatenate([places[starts[first] : starts[first] + shared[first]], span]))
        groups, scatter, begin = [], np.empty(size, dtype=np.int64), 0
        for members in _group_spans([len(span) for span in queries], [len(path) for path in paths]):
            asked = _pad([queries[at] for at in members])
            is_token = np.diff(asked, prepend=-1) > 0
            scatter[asked[is_token]] = begin + np.flatnonzero(is_token)
            begin += asked.size
            keys = _pad([paths[at] for at in members], size)
            is_causal = len(queries[members[0]]) == len(paths[members[0]])
            groups.append(SpanGroup(torch.from_numpy(asked).to(device), torch.from_numpy(keys).to(device), is_causal))
        ends = np.append(find_ends(lengths, shared), 0)
        positions = np.append(np.arange(size) - np.repeat(begins - shared, own), 0)
        return cls(groups, *(torch.from_numpy(array).to(device) for array in (scatter, ends, positions)))

    def count_pairs(self) -> int:
        """Queries times keys of all groups, padding included."""
        return sum(group.queries.numel() * group.keys.shape[1] for group in self.groups)

    def attend(
        self,
        attend: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None,
        dtype: torch.dtype,
        tokens_ahead: Tensor | None = None,
    ) -> Tensor:
        """[1, U, H, D] from `query` [1, H, U, D] and `key`, `value` [1, H_kv, U, D]. `attend` is
        sdpa of one group, (query, key, value, mask) -> [G, Q, H, D]; it computes in `dtype`.
        `tokens_ahead` [U]: how many tokens behind itself a token sees, the same in all layers."""
        rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        parts = []
        for group, mask in zip(self.groups, self.masks(window, dtype, tokens_ahead), strict=True):
            indices = (group.queries, *[group.keys.clamp(max=len(self._scatter) - 1)] * 2)
            picked = [
                row.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
                for row, index in zip(rows, indices, strict=True)
            ]
            parts.append(attend(*picked, mask).flatten(0, 1))
        return torch.cat(parts).index_select(0, self._scatter)[None]

    def masks(self, window: int | None, dtype: torch.dtype, tokens_ahead: Tensor | None = None) -> list[Tensor | None]:
        """The term added to the scores of each group: 0 or -inf. Made once for all layers."""
        if (window, dtype) not in self._masks:
            seen = [group.find_seen(self._ends, self._positions, window, tokens_ahead) for group in self.groups]
            self._masks[window, dtype] = [
                None if each is None else torch.zeros(each.shape, dtype=dtype, device=each.device).masked_fill_(~each, -torch.inf)
                for each in seen
            ]
        return self._masks[window, dtype]


def _find_spans(lengths: Ints, shared: Ints) -> list[tuple[int, int]]:
    """(first, last) sample of each span. The first branch of a tree is alone, so that it needs no
    mask. The others are joined until they have a quarter as many tokens as the path before them,
    and 64: each key that is copied has this number of queries, and few of them see only a small
    part."""
    own, tokens = lengths - shared, 0
    spans: list[tuple[int, int]] = []
    for at in np.flatnonzero(own).tolist():
        first = spans[-1][0] if spans else at
        if shared[at] and shared[first] and tokens < max(64, shared[first] / 4):
            spans[-1] = (first, at)
            tokens += own[at]
        else:
            spans.append((at, at))
            tokens = own[at]
    return spans


def _group_spans(queries: Sequence[int], keys: Sequence[int]) -> list[list[int]]:
    """Indices of the spans in groups: those that begin a tree, then the others, from those with
    most keys down. A span that would be padded by more than 16 tokens and more than a quarter of
    the group's longest starts a new group."""
    groups: list[list[int]] = []
    for at in sorted(range(len(keys)), key=lambda at: (queries[at] < keys[at], -keys[at], -queries[at])):
        if groups:
            first = groups[-1][0]
            alike = (queries[at] < keys[at]) == (queries[first] < keys[first])
            if alike and _is_near(keys[at], keys[first]) and _is_near(queries[at], queries[first]):
                groups[-1].append(at)
                continue
        groups.append([at])
    return groups


def _is_near(length: int, longest: int) -> bool:
    return abs(longest - length) <= max(16, longest // 4)


def _pad(rows: Sequence[Ints], value: int | None = None) -> Ints:
    """[G, L] the rows, padded with `value`, or with the last of each if None."""
    padded = np.empty((len(rows), max(map(len, rows))), dtype=np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
        line[len(row) :] = row[-1] if value is None else value
    return padded


@dataclass(frozen=True)
class PrefixTrees:
    """What the model reads instead of the samples."""

    input_ids: Tensor
    """[1, U]."""
    position_ids: Tensor
    """[1, U] the position of each token in its samples."""
    places: Tensor
    """[S] the place in the row of each token of the samples, which are concatenated."""
    arrays: Mapping[str, Ints]
    """Positions and places as `SampleTable.collate_trees` makes them."""
    lengths: Ints
    """[N] tokens of each sample."""
    shared: Ints
    """[N] how many of them it shares with the one before it."""

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, Ints],
        lengths: Sequence[int] | NDArray[Any],
        shared: Ints,
        device: torch.device | str,
        order: Ints | None = None,
    ) -> PrefixTrees:
        """`arrays` come from `SampleTable.collate_trees`; `lengths` and `shared` [N]. `order` [N]:
        which sample of the batch is at each place of the trees. None means the same order.

        Example: places 0 1 | 0 2 with the order [1, 0] are 0 2 | 0 1 in the batch."""
        places, sizes = arrays["places"], np.asarray(lengths, dtype=np.int64)
        if order is not None:
            parts = np.split(places, sizes.cumsum()[:-1])
            places = np.concatenate([parts[at] for at in np.argsort(order)])
        ids, positions = (torch.from_numpy(arrays[name]).to(device) for name in ("input_ids", "position_ids"))
        return cls(ids, positions, torch.from_numpy(places).to(device), arrays, sizes, shared)

    @cached_property
    def branches(self) -> Branches:
        """The attention by sdpa."""
        return Branches.of_samples(self.lengths, self.shared, self.arrays["places"], self.places.device)

    @cached_property
    def intervals(self) -> PrefixIntervals:
        """The attention by FlexAttention."""
        ends = find_ends(self.lengths, self.shared)
        return PrefixIntervals(ends, self.arrays["position_ids"][0], self.places.device)

    def keywords(self, attention: str | None) -> dict[str, Any]:
        """The keywords of a forward pass over the row, for a model whose attention is one of
        `packed_attention.OWN`."""
        # transformers passes a 4D mask on unchanged; an empty one cannot be used by mistake.
        empty = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=self.places.device)
        paths = {"prefix_intervals": self.intervals} if attention == PREFIX_FLEX else {"prefix_branches": self.branches}
        return {"position_ids": self.position_ids, "attention_mask": empty, **paths}


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

    def count_pairs(self, window: int | None) -> int:
        """Queries times keys of the blocks that are computed."""
        return int(self._find_blocks(window, np.arange(len(self._ends)))[0].sum()) * BLOCK**2

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        window: int | None = None,
        tokens_ahead: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """[1, U, H, D] from `query` [1, H, U, D] and `key`, `value` [1, H_kv, U, D]. `window`: the
        number of tokens that a token sees, itself included; `tokens_ahead` [U]: how many behind it.
        Options: `scaling`, `softcap` as in transformers. Raises ValueError for options that
        FlexAttention does not support."""
        given = [name for name in UNSUPPORTED if options.get(name) is not None]
        given += ["dropout"] if options.get("dropout") else []
        if given:
            raise ValueError(f"FlexAttention over prefix trees supports no {', '.join(given)}")
        softcap = options.get("softcap")
        padded = (F.pad(tensor, (0, 0, 0, self._padding)) for tensor in (query, key, value))
        attended: Tensor = _flex_attention(query.device.type)(
            *padded,
            score_mod=None if softcap is None else _make_cap(softcap),
            block_mask=self.mask(window, tokens_ahead),
            scale=options.get("scaling"),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended[:, :, : query.shape[2]].transpose(1, 2)

    def mask(self, window: int | None = None, tokens_ahead: Tensor | None = None) -> BlockMask:
        """The mask of P queries and P keys. `tokens_ahead` is the same for all windows."""
        if window in self._masks:
            return self._masks[window]
        reach = np.arange(len(self._ends))  # the last token that each sees
        if tokens_ahead is not None:
            reach[: len(tokens_ahead)] += tokens_ahead.cpu().numpy()
        some, every = self._find_blocks(window, reach)
        partial, full = (_list_blocks(blocks, self._device) for blocks in (some & ~every, every))
        arrays = (self._ends, self._positions, reach)
        ends, positions, last = (torch.from_numpy(array.astype(np.int32)).to(self._device) for array in arrays)

        def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = (last[query] >= key) & (query < ends[key])
            return seen if window is None else seen & (positions[query] - positions[key] < window)

        size = len(self._ends)
        made = BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=is_seen, seq_lengths=(size, size))
        return self._masks.setdefault(window, made)

    def _find_blocks(self, window: int | None, reach: Ints) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """[P / 128, P / 128] whether some query of a block may see some key of the other, and
        whether each sees each. `reach` [P]: the last token that each token sees."""
        first = np.arange(0, len(self._ends), BLOCK)
        last = first + BLOCK - 1
        ends, positions, reach = (array.reshape(-1, BLOCK) for array in (self._ends, self._positions, reach))
        some = (reach.max(1)[:, None] >= first) & (first[:, None] < ends.max(1))
        every = (reach.min(1)[:, None] >= last) & (last[:, None] < ends.min(1))
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
