"""What the model has read of an episode stays read: its next turn begins with the keys and values
of the turns before.

They hold for the weights that computed them. Shapes: N rows, H heads, T columns of the cache, D
size of a head, K tokens kept.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ludic.inference.current_episode import Episode

LEAST_SHARE = 0.5
"""Of a prompt that must be known: below it, reading the whole is as quick."""
SAMPLED_ELEMENTS = 256
"""Of each parameter, to tell a change that the version counters of tensors do not show."""
PLAIN_ROPE = {"default", "linear", "llama3", "yarn"}
"""Others, such as longrope and dynamic, turn the keys of a long dialogue in another way than
those of a short one."""
_numbers = count()


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The cache of one batch at one time."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    """Keys and values, [N, H, T, D] each."""
    mask: Tensor
    """[N, T] bool: which columns hold a token of the row."""
    number: int

    @classmethod
    def of(cls, cache: Any, mask: Tensor) -> Snapshot:
        return cls(tuple((layer.keys, layer.values) for layer in cache.layers), mask.bool(), next(_numbers))

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)


@dataclass(frozen=True)
class Prefix:
    """What was read of one dialogue."""

    snapshot: Snapshot
    row: int
    ids: list[int]
    """[K] the tokens of the row's first K columns that hold one."""


@dataclass(frozen=True)
class Match:
    """The first `length` tokens of a prompt, which are those of `prefix`."""

    prefix: Prefix
    length: int


class PrefixCache:
    """The prefixes of the episodes that are being played, of at most `max_bytes`, and while a
    batch is decoded of twice that. The oldest go first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._prefixes: dict[Episode, list[Prefix]] = {}
        """Of episodes that have not ended. They end in the thread that plays them, also while
        another decodes."""
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self._weights: object = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are held."""
        return sum(snapshot.nbytes for snapshot in self._snapshots)

    def hold_to(self, model: nn.Module) -> None:
        """Forget everything if the weights are not those that it was computed with."""
        weights = weights_mark(model)
        if weights != self._weights:
            self.clear()
            self._weights = weights

    def clear(self) -> None:
        """Forget everything."""
        self._prefixes.clear()

    def longest(self, episode: Episode, prompt_ids: Sequence[int]) -> Match | None:
        """The most of a prompt that was read before; its last token is always read anew, for its
        logits."""
        best: Match | None = None
        for prefix in self._prefixes.get(episode, ()):
            length = min(_common(prefix.ids, prompt_ids), len(prompt_ids) - 1)
            if length >= max(1, LEAST_SHARE * len(prompt_ids)) and (best is None or length > best.length):
                best = Match(prefix, length)
        return best

    def keep(self, episode: Episode, prefix: Prefix) -> None:
        """Remember a dialogue for the episode's next turns. One that it goes on from is
        forgotten."""
        kept = self._prefixes.setdefault(episode, [])
        kept[:] = [*(p for p in kept if _common(p.ids, prefix.ids) < len(p.ids)), prefix]
        self._snapshots.add(prefix.snapshot)
        episode.at_end(self._forget)

    def _forget(self, episode: Episode) -> None:
        self._prefixes.pop(episode, None)

    def shrink(self) -> None:
        """Forget the oldest snapshots until what is left fits."""
        left = sorted(self._snapshots, key=lambda snapshot: snapshot.number)
        size, dropped = sum(snapshot.nbytes for snapshot in left), set[int]()
        for snapshot in left:
            if size <= self.max_bytes:
                break
            size -= snapshot.nbytes
            dropped.add(snapshot.number)
        if dropped:
            for prefixes in list(self._prefixes.values()):
                prefixes[:] = [p for p in prefixes if p.snapshot.number not in dropped]


def is_plain(model: Any, cache: Any, device: torch.device) -> bool:
    """Whether rows of the cache can be taken apart and joined: every layer keeps every token,
    all of them on one device, and positions are rotary ones that depend neither on the columns
    between two tokens nor on how long the dialogue becomes."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    return (
        _rope_types(getattr(model, "config", None)) <= PLAIN_ROPE
        and type(cache) is DynamicCache
        and all(type(layer) is DynamicLayer and layer.keys.device == device for layer in cache.layers)
    )


def _rope_types(config: Any) -> set[str]:
    """The kinds of rotary positions of a model; `none` where it has none."""
    given = getattr(config, "rope_parameters", None) or {}
    of_layers = [part for part in given.values() if isinstance(part, dict)] or [given]
    return {part.get("rope_type") or ("default" if "rope_theta" in part else "none") for part in of_layers}


def joined(matches: Sequence[Match]) -> tuple[Any, Tensor]:
    """The cache that the matches begin with, row by row, and which of its columns hold a token,
    [N, T] int64."""
    from transformers.cache_utils import DynamicCache

    groups: dict[int, list[int]] = {}
    for place, match in enumerate(matches):
        groups.setdefault(match.prefix.snapshot.number, []).append(place)
    parts = [_Part.of([matches[place] for place in places], places) for places in groups.values()]
    width = max(part.mask.shape[1] for part in parts)

    def whole(tensors: Sequence[Tensor], dim: int) -> Tensor:
        return _stacked(tensors, parts, len(matches), width, dim=dim)

    layers = [
        (whole([keys for keys, _ in pairs], 2), whole([values for _, values in pairs], 2))
        for pairs in zip(*(part.layers for part in parts), strict=True)
    ]
    return DynamicCache(layers), whole([part.mask for part in parts], 1).long()


@dataclass(frozen=True)
class _Part:
    """The matches in one snapshot, and where they stand among all."""

    places: Tensor
    layers: list[tuple[Tensor, Tensor]]
    mask: Tensor

    @classmethod
    def of(cls, matches: Sequence[Match], places: Sequence[int]) -> _Part:
        snapshot = matches[0].prefix.snapshot
        device = snapshot.mask.device
        rows = torch.tensor([match.prefix.row for match in matches], device=device)
        lengths = torch.tensor([match.length for match in matches], device=device)
        mask = snapshot.mask[rows]
        mask &= mask.cumsum(dim=1) <= lengths[:, None]
        columns = mask.any(dim=0).nonzero().squeeze(1)  # what no row needs any more stays behind
        layers = [(keys[rows][:, :, columns], values[rows][:, :, columns]) for keys, values in snapshot.layers]
        return cls(torch.tensor(places, device=device), layers, mask[:, columns])


def _stacked(tensors: Sequence[Tensor], parts: Sequence[_Part], rows: int, width: int, *, dim: int) -> Tensor:
    """The rows of all parts in their places, aligned at the last column."""
    if len(tensors) == 1:
        return tensors[0]
    shape = [rows, *tensors[0].shape[1:]]
    shape[dim] = width
    whole = tensors[0].new_zeros(shape)
    for tensor, part in zip(tensors, parts, strict=True):
        whole.narrow(dim, width - tensor.shape[dim], tensor.shape[dim])[part.places] = tensor
    return whole


def weights_mark(model: nn.Module) -> object:
    """Equal as long as the model stays as it is, without reading all of it: where each tensor
    lies, how often it was written in place, a few of its elements, and which adapters are at
    work. Never equal where weights are loaded as they are needed."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return object()
    places = [(tensor.data_ptr(), None if tensor.is_inference() else tensor._version) for tensor in tensors]
    sums: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
            sums.setdefault(tensor.device, []).append(flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)].double().sum())
    return places, [torch.stack(of_device).tolist() for of_device in sums.values()], _adapters_at_work(model)


def _adapters_at_work(model: nn.Module) -> list[tuple[object, ...]]:
    """What PEFT's layers add to their weights."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None:
        return []
    return [
        (tuple(layer.active_adapters), layer.disable_adapters, tuple(layer.merged_adapters), str(getattr(layer, "scaling", None)))
        for layer in model.modules()
        if isinstance(layer, peft.BaseTunerLayer)
    ]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])
