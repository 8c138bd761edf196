"""Prefix cache: each turn of an episode reuses the keys and values of the previous turns.

They are valid only for the weights that computed them. Shapes: N rows, H heads, T columns of the
cache, D size of a head, K cached tokens.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ludic.inference.client import Episode
from ludic.models.images.features import Features
from ludic.models.wrappers import find_text_config
from ludic.types import ImageSpan

MIN_CACHED_SHARE = 0.5
"""Share of a prompt below which a cached prefix is not used, because reading the whole prompt is as
fast."""
SAMPLED_ELEMENTS = 256
"""Elements read of each parameter, to detect changes that tensors' version counters do not show."""
PREFIX_STABLE_ROPE = {"default", "linear", "llama3", "yarn"}
"""RoPE types that rotate a key by its position alone. Others, such as longrope and dynamic, also
depend on the length of the dialogue."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The cache of one batch at one step."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    """Keys and values, [N, H, T, D] each."""
    mask: Tensor
    """[N, T] bool: True where a column holds a token of the row, False for padding."""
    number: int = field(default_factory=count().__next__)
    """Of the oldest, 0."""

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)


@dataclass(frozen=True)
class Prefix:
    """The cached beginning of one dialogue."""

    snapshot: Snapshot
    row: int
    ids: list[int]
    """[K] the tokens in the row's first K columns without padding. Those of images are keyed
    (`models.images.rows`)."""
    routes: NDArray[Any] | None = None
    """[K, L, k] the experts of these tokens, if they are kept."""


@dataclass(frozen=True)
class Match:
    """The first `length` tokens of a prompt equal `prefix`."""

    prefix: Prefix
    length: int


class PrefixCache:
    """The prefixes of running episodes, and the features of the images that were read last: at most
    `max_bytes`, and twice that while a batch is being decoded. The oldest are dropped first,
    features before prefixes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._prefixes: dict[Episode, list[Prefix]] = {}
        """The prefixes of episodes that have not ended. An episode may end in its own thread while
        another thread decodes."""
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self._weights: object = None
        self.features: dict[str, Features] = {}
        """Digest -> the features of the image."""
        self.numbers: dict[str, int] = {}
        """Digest -> the number of the image in the ids of prefixes."""

    @property
    def nbytes(self) -> int:
        """Bytes of all cached keys and values."""
        return sum(snapshot.nbytes for snapshot in self._snapshots)

    def clear_if_changed(self, model: nn.Module) -> None:
        """Clear the cache if the model's weights have changed."""
        weights = weights_fingerprint(model)
        if weights != self._weights:
            self.clear()
            self._weights = weights

    def clear(self) -> None:
        """Drop all prefixes and features."""
        for known in (self._prefixes, self.features, self.numbers):
            known.clear()

    def longest_match(self, episode: Episode, prompt_ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> Match | None:
        """The longest cached prefix of a prompt, without its last token, whose logits are needed.
        It ends in none of the prompt's `images`, which are read as a whole.

        Cached [5, 6, 7] and prompt [5, 6, 7] match in 2 tokens; prompt [5, 6, 9, 9, 9] in none,
        as 2 of 5 are below `MIN_CACHED_SHARE`.
        """
        best: Match | None = None
        for prefix in self._prefixes.get(episode, ()):
            length = min(_common_length(prefix.ids, prompt_ids), len(prompt_ids) - 1)
            length = next((start for _, start, size in images if start < length < start + size), length)
            if length >= max(1, MIN_CACHED_SHARE * len(prompt_ids)) and (best is None or length > best.length):
                best = Match(prefix, length)
        return best

    def add(self, episode: Episode, prefix: Prefix) -> None:
        """Cache a dialogue for the episode's later turns. Replaces prefixes that it extends."""
        cached = self._prefixes.setdefault(episode, [])
        cached[:] = [*(p for p in cached if _common_length(p.ids, prefix.ids) < len(p.ids)), prefix]
        self._snapshots.add(prefix.snapshot)
        episode.on_end(lambda over: self._prefixes.pop(over, None))

    def shrink(self) -> None:
        """Drop the oldest snapshots and features until the rest fits into `max_bytes`."""
        snapshots = sorted(self._snapshots, key=lambda snapshot: snapshot.number)
        size, dropped = sum(snapshot.nbytes for snapshot in snapshots), set[int]()
        for snapshot in snapshots:
            if size <= self.max_bytes:
                break
            size -= snapshot.nbytes
            dropped.add(snapshot.number)
        for digest, known in reversed(list(self.features.items())):
            size += known.nbytes
            if size > self.max_bytes:
                del self.features[digest]
        if dropped:
            for prefixes in list(self._prefixes.values()):
                prefixes[:] = [p for p in prefixes if p.snapshot.number not in dropped]


def is_plain(cache: Any, device: torch.device) -> bool:
    """Whether every layer of the cache keeps the keys and values of every token, on this device."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    return (
        type(cache) is DynamicCache
        and len(cache.layers) > 0
        and all(type(layer) is DynamicLayer and layer.keys is not None and layer.keys.device == device for layer in cache.layers)
    )


def is_separable(model: Any, cache: Any) -> bool:
    """Whether rows of the cache can be separated and joined with rows of others. For that, every
    layer must keep every token, all on one device, as in a `RowCache`, and positions must be rotary
    and depend neither on the columns between two tokens nor on the final length of the dialogue."""
    from ludic.inference.local.row_cache import RowCache

    parameters = getattr(find_text_config(model), "rope_parameters", None) or {}
    of_layers = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
    types = {part.get("rope_type") or ("default" if "rope_theta" in part else "none") for part in of_layers}
    return isinstance(cache, RowCache) and types <= PREFIX_STABLE_ROPE


def join_prefixes(matches: Sequence[Match]) -> tuple[Any, Tensor]:
    """One cache whose row i holds the prefix of match i, and the mask of its columns that hold a
    token, [N, T] int64."""
    from transformers.cache_utils import DynamicCache

    groups: dict[int, list[int]] = {}
    for place, match in enumerate(matches):
        groups.setdefault(match.prefix.snapshot.number, []).append(place)
    parts = [_Part.of([matches[place] for place in places], places) for places in groups.values()]
    width = max(part.mask.shape[1] for part in parts)

    def merge(tensors: Sequence[Tensor], dim: int) -> Tensor:
        return _merge(tensors, parts, len(matches), width, dim=dim)

    layers = [
        (merge([keys for keys, _ in pairs], 2), merge([values for _, values in pairs], 2))
        for pairs in zip(*(part.layers for part in parts), strict=True)
    ]
    return DynamicCache(layers), merge([part.mask for part in parts], 1).long()


@dataclass(frozen=True)
class _Part:
    """The matches in one snapshot, and their positions among all matches."""

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
        columns = mask.any(dim=0).nonzero().squeeze(1)  # drop columns that no row uses
        layers = [(keys[rows][:, :, columns], values[rows][:, :, columns]) for keys, values in snapshot.layers]
        return cls(torch.tensor(places, device=device), layers, mask[:, columns])


def _merge(tensors: Sequence[Tensor], parts: Sequence[_Part], rows: int, width: int, *, dim: int) -> Tensor:
    """Tensors with the rows of all parts in their places, right-aligned.

    Parts [[1, 2]] at row 1 and [[3]] at row 0 give [[0, 3], [1, 2]].
    """
    if len(tensors) == 1:
        return tensors[0]
    shape = [rows, *tensors[0].shape[1:]]
    shape[dim] = width
    whole = tensors[0].new_zeros(shape)
    for tensor, part in zip(tensors, parts, strict=True):
        whole.narrow(dim, width - tensor.shape[dim], tensor.shape[dim])[part.places] = tensor
    return whole


def weights_fingerprint(model: nn.Module) -> object:
    """A value that changes when the model's weights change, without reading all of them: the
    address of each tensor, how often it was written in place, a few of its elements, and the active
    adapters. Always a new value if weights are loaded on demand."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return object()
    places = [(tensor.data_ptr(), None if tensor.is_inference() else tensor._version) for tensor in tensors]
    sums: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
            sums.setdefault(tensor.device, []).append(flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)].double().sum())
    return places, [torch.stack(of_device).tolist() for of_device in sums.values()], _active_adapters(model)


def _active_adapters(model: nn.Module) -> list[tuple[object, ...]]:
    peft = sys.modules.get("peft.tuners.tuners_utils")
    if peft is None:
        return []
    return [
        (tuple(layer.active_adapters), layer.disable_adapters, tuple(layer.merged_adapters), str(getattr(layer, "scaling", None)))
        for layer in model.modules()
        if isinstance(layer, peft.BaseTunerLayer)
    ]


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix: [5, 6, 7] and [5, 6, 9, 9] give 2."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])
