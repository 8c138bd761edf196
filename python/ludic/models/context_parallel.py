"""Context parallelism: several ranks compute one row, as in DeepSpeed-Ulysses (arXiv:2309.14509).

Outside of attention each rank of a group has a slice of the row's tokens. In attention each has
some heads of all tokens, so that any attention function, mask or window sees whole rows.

    the row  a b c d e, heads 1 2 3 4, 2 ranks
               rank 0           rank 1
    layers     a b c            d e _      _ is padding, which attention does not see
    attention  1 2 of a .. e    3 4 of a .. e

An all-to-all of queries, keys and values goes before attention, and one of its output after it.
Values that losses read, such as log-probabilities, are joined to whole rows (`RowSlice.add`): all
ranks of a group compute the same loss. Each gets the gradient of its slice, so that the gradients
of a weight add up over the ranks of a group as over the ranks that have other samples.

Shapes: c ranks of a group, S tokens of a row, w = ceil(S / c) tokens of a slice, H heads, D width
of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from ludic.errors import ConfigError
from ludic.models.images.rows import IMAGES
from ludic.models.prefix_trees import PREFIX_TREES, PrefixTrees

CONTEXT = "context"
"""Name of the `ContextGroup` of a batch whose rows several ranks compute together."""


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that compute the same rows."""

    group: dist.ProcessGroup
    rank: int
    """Of this process, within the group."""
    size: int


@dataclass(frozen=True)
class RowSlice:
    """The tokens of one row that this rank has. All ranks of the group call the methods that
    exchange tensors."""

    context: ContextGroup
    tokens: int
    """S, the tokens of the whole row."""

    @property
    def width(self) -> int:
        """w, the tokens of each slice."""
        return -(-self.tokens // self.context.size)

    @property
    def start(self) -> int:
        """The place in the row of the first token of this rank."""
        return self.context.rank * self.width

    def cut(self, row: Tensor) -> Tensor:
        """[1, w] of a row [1, S], with 0 as padding."""
        return pad(row, (0, self.width * self.context.size - self.tokens))[:, self.start : self.start + self.width]

    def find_own(self, places: Tensor) -> Tensor:
        """Indices of the `places` in the row that are in this slice. Example: S = 5 and 2 ranks;
        of the places [4, 0, 3] rank 0 has the index 1, and rank 1 the indices 0 and 2."""
        return ((places >= self.start) & (places < self.start + self.width)).nonzero().squeeze(1)

    def add(self, values: Tensor) -> Tensor:
        """The sum over the ranks, which are 0 wherever another rank has the value. The gradient is
        not summed: all ranks have the same one, of the same loss."""
        added: Tensor = _Added.apply(values, self.context.group)
        return added

    def join(self, own: Tensor) -> Tensor:
        """[1, S, ...] of the slices [1, w, ...] of all ranks."""
        others = self.width * self.context.size - self.width - self.start
        return self.add(pad(own[0], (0, 0) * (own.ndim - 2) + (self.start, others)))[None, : self.tokens]

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[1, H / c, S, D] of `query` [1, H, w, D], `key` and `value` [1, H_kv, w, D]. If there are
        fewer key heads than ranks, several ranks have the same one. Raises ConfigError for heads
        that cannot be divided."""
        ranks, heads, shared = self.context.size, query.shape[1], key.shape[1]
        if heads % ranks or (shared % ranks and ranks % shared):
            kinds = f"{heads} attention heads" if heads == shared else f"{heads} attention heads and {shared} key heads"
            raise ConfigError(f"{kinds} cannot be divided among {ranks} ranks")
        copies = max(1, ranks // shared)  # of 2 key heads for 4 ranks: 1 1 2 2
        key, value = (self._exchange(each.repeat_interleave(copies, dim=1)) for each in (key, value))
        return self._exchange(query), key, value

    def _exchange(self, tensor: Tensor) -> Tensor:
        """[1, H / c, S, D] of [1, H, w, D]."""
        received = _swap(tensor[0].unflatten(0, (self.context.size, -1)), self.context)  # [c, H / c, w, D], by slices
        return received.transpose(0, 1).flatten(1, 2)[None, :, : self.tokens]

    def to_tokens(self, attended: Tensor) -> Tensor:
        """[1, w, H, D] of [1, S, H / c, D]."""
        padded = pad(attended[0], (0, 0, 0, 0, 0, self.width * self.context.size - self.tokens))
        received = _swap(padded.unflatten(0, (self.context.size, -1)), self.context)  # [c, w, H / c, D], by heads
        return received.transpose(0, 1).flatten(1, 2)[None]


class ModelRow(NamedTuple):
    """What the model computes for a batch."""

    batch: Mapping[str, Any]
    """With `CONTEXT`, the real tokens of a padded batch as one row [1, S]."""
    places: Tensor | None = None
    """[B * T] the place in the row of each token of the samples; None means its own."""
    part: RowSlice | None = None
    """The tokens that this rank computes; None means all."""
    shape: tuple[int, int] | None = None
    """(B, T) of the padded batch that was made a row."""

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> ModelRow:
        trees: PrefixTrees | None = batch.get(PREFIX_TREES)
        context: ContextGroup | None = batch.get(CONTEXT)
        if context is None:
            return cls(batch, None if trees is None else trees.places)
        if IMAGES in batch:
            raise ConfigError(f"samples with images are computed whole; set sharding.context ({context.size}) to 1")
        if trees is not None:
            return cls(batch, trees.places, RowSlice(context, trees.input_ids.shape[1]))
        ids: Tensor = batch["input_ids"]
        if "cu_seqlens" in batch:
            return cls(batch, None, RowSlice(context, ids.shape[1]))
        # Rows a b . and c d e with mask [1 1 0], [1 1 1] are the row a b c d e. The padding gets
        # the place of the token before it, as its result is not read: 0 1 1 | 2 3 4.
        real = batch["attention_mask"] != 0
        positions, bounds = torch.arange(ids.shape[1], device=ids.device).expand_as(ids), pad(real.sum(dim=1).cumsum(0), (1, 0))
        row = {"input_ids": ids[real][None], "position_ids": positions[real][None], "cu_seqlens": bounds}
        places = (real.flatten().cumsum(0) - 1).clamp(min=0)
        return cls(row, places, RowSlice(context, row["input_ids"].shape[1]), (ids.shape[0], ids.shape[1]))

    def join(self, own: Tensor) -> Tensor:
        """What `forward_logits` returns, of the slices [1, w, ...] of all ranks."""
        joined = own if self.part is None else self.part.join(own)
        if self.shape is None:
            return joined
        assert self.places is not None
        return joined[0].index_select(0, self.places).unflatten(0, self.shape)

    def by_token(self, own: Tensor) -> Tensor:
        """[B, T, ...], in the layout of the samples' `input_ids`."""
        joined = self.join(own)
        return joined if self.places is None or self.shape is not None else joined.index_select(1, self.places)


def divided_by_heads(attend: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """The attention function, which with the keyword `row_slice` gets and returns slices: `query`
    [1, H, w, D], `key` and `value` [1, H_kv, w, D], and [1, w, H, D]. It sees some heads of the
    whole row."""

    @wraps(attend)
    def divided(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, row_slice: RowSlice | None = None, **options: Any
    ) -> tuple[Tensor, None]:
        if row_slice is None:
            return attend(module, query, key, value, *args, **options)
        query, key, value = row_slice.to_heads(query, key, value)
        # What sdpa reads of the module; of key heads that are copied, each rank has its own.
        groups, is_causal = query.shape[1] // key.shape[1], getattr(module, "is_causal", True)
        layer = SimpleNamespace(num_key_value_groups=groups, is_causal=is_causal)
        return row_slice.to_tokens(attend(layer, query, key, value, *args, **options)[0]), None

    return divided


def _swap(chunks: Tensor, context: ContextGroup) -> Tensor:
    swapped: Tensor = _Swapped.apply(chunks, context.group)
    return swapped


class _Swapped(torch.autograd.Function):
    """Chunk i of [c, ...] goes to rank i; the result has the chunk of each rank for this one. The
    gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, chunks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        sent = chunks.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Swapped.forward(ctx, grads[0], ctx.group), None


class _Added(torch.autograd.Function):
    """f(x) = the sum of x over the ranks, df/dx = 1."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
