"""A row of prefix trees: samples that begin alike, of which each token is computed once.

    samples  [1 2 3 4], [1 2 5]        the row  1 2 3 4 5   positions  0 1 2 3 2
                                       places   0 1 2 3 | 0 1 4

Each sample adds a **branch** to the row: the tokens that it does not share with the sample before
it. A token attends to the tokens before it in its samples, which are those of its branch and those
that the branch begins with: above, 5 sees 1, 2 and itself. No mask of the whole row is built: the
queries of a branch meet the keys of its path alone, in groups of branches of similar length.

Shapes: U tokens of the row, S tokens of all samples, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludic.models.prefix_intervals import PrefixIntervals, find_ends

PREFIX_TREES = "prefix_trees"
"""Name of the `PrefixTrees` of a batch."""
PREFIX_FLEX = "ludic_packed_flex"
"""Name of the attention of a model that computes trees with FlexAttention."""
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class BranchGroup:
    """Branches of similar length: G branches, padded to Q queries and K keys on the right.

    Example: above, [1 2 3 4] has 4 queries and 4 keys; [5] has one query and the keys 1 2 5.
    """

    queries: Tensor
    """[G * Q] the row's token at each place; a branch's last one again as padding."""
    keys: Tensor
    """[G * K] the row's token at each place of the paths, in the same way."""
    shape: tuple[int, int, int]
    """(G, Q, K)."""
    begins: Tensor | None
    """[G] position of the first query in its path. None: all are 0, and queries and keys are the
    same, so that causal attention needs no mask."""

    def mask(self, window: int | None) -> Tensor | None:
        """[G, 1, Q, K] which keys each query sees: those up to its own position, with `window` the
        last `window` of them. None: causal attention says so.

        One query at position 2 of 3 keys sees [1 1 1], with a window of 2 [0 1 1]."""
        _, queries, keys = self.shape
        if self.begins is None and (window is None or keys <= window):
            return None
        begins = self.queries.new_zeros(self.shape[0]) if self.begins is None else self.begins
        place = torch.arange(max(queries, keys), device=self.queries.device)
        # A query of the padding may lie behind all keys. It sees the last one: with none, some
        # kernels return nan, and its gradient reaches the keys.
        behind = (begins[:, None] + place[:queries]).clamp(max=keys - 1)[:, :, None] - place[:keys]
        seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        return seen[:, None]


@dataclass(frozen=True)
class Branches:
    """The attention of a row of trees."""

    groups: tuple[BranchGroup, ...]
    scatter: Tensor
    """[U] the place of each token of the row among the queries of all groups."""

    @classmethod
    def of_samples(cls, lengths: Ints, shared: Ints, places: Ints, device: torch.device | str) -> Branches:
        """`lengths` and `shared` [N]: tokens of each sample, and how many of them it shares with
        the one before it; `places` [S] their places in the row."""
        ends = lengths.cumsum()
        own = lengths - shared
        first = own.cumsum() - own
        groups, scatter, begin = [], np.empty(int(own.sum()), dtype=np.int64), 0
        for members in _group_branches(lengths, own):
            queries, keys = int(own[members].max()), int(lengths[members].max())
            column = np.minimum(np.arange(queries), own[members, None] - 1)
            asked = first[members, None] + column
            path = np.minimum(np.arange(keys), lengths[members, None] - 1)
            seen = places[(ends - lengths)[members, None] + path]
            is_token = np.arange(queries) < own[members, None]
            scatter[asked[is_token]] = begin + np.flatnonzero(is_token)
            begin += asked.size
            root = not shared[members].any()
            groups.append(
                BranchGroup(
                    torch.from_numpy(asked.reshape(-1)).to(device),
                    torch.from_numpy(seen.reshape(-1)).to(device),
                    (len(members), queries, keys),
                    None if root else torch.from_numpy(shared[members]).to(device),
                )
            )
        return cls(tuple(groups), torch.from_numpy(scatter).to(device))

    def attend(self, attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """[1, U, H, D] from `query` [1, H, U, D] and `key`, `value` [1, H_kv, U, D]. `attend` is
        sdpa of one group, (query, key, value, mask) -> [G, Q, H, D]."""
        rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        parts = []
        for group in self.groups:
            count, queries, keys = group.shape
            picked = [rows[0].index_select(0, group.queries).unflatten(0, (count, queries))]
            picked += [row.index_select(0, group.keys).unflatten(0, (count, keys)) for row in rows[1:]]
            parts.append(attend(*(part.transpose(1, 2) for part in picked), group.mask(window)).flatten(0, 1))
        return torch.cat(parts).index_select(0, self.scatter)[None]


def _group_branches(lengths: Ints, own: Ints) -> list[list[int]]:
    """Indices of the branches in groups: those that begin a tree, then the others, from the longest
    paths down. A branch that would be padded by more than 16 tokens and more than a quarter of the
    group's longest starts a new group; samples that add nothing are in none."""
    groups: list[list[int]] = []
    order = sorted(np.flatnonzero(own).tolist(), key=lambda at: (own[at] < lengths[at], -lengths[at], -own[at]))
    for at in order:
        if groups:
            first = groups[-1][0]
            alike = (own[at] < lengths[at]) == (own[first] < lengths[first])
            if alike and _is_near(lengths[at], lengths[first]) and _is_near(own[at], own[first]):
                groups[-1].append(at)
                continue
        groups.append([at])
    return groups


def _is_near(length: int, longest: int) -> bool:
    return abs(int(longest) - int(length)) <= max(16, int(longest) // 4)


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
        """`arrays`: those of `SampleTable.collate_trees`; `lengths` and `shared` [N]. `order` [N]:
        which sample of the batch is at each place of the trees; None: they have the same order.

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
