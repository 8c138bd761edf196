"""Log-probabilities and entropy from hidden states, without the logits [B, T, V].

The logits of N positions are computed for some columns of the vocabulary at a time, in the dtype of
the model, and reduced in float32. The backward pass computes them again. The tensors kept are [N]
and [N, D]; the gradient of the output layer is written once, in its own dtype.

For one position with logits x, m = max x, s = sum exp(x - m) and t = sum exp(x - m) (x - m):

    log p_i = x_i - m - log s        H = log s - t / s

A tile of columns with a larger maximum m' = m + d changes the sums so far to s e^-d and
(t - d s) e^-d. Example: columns [0, 0] and then [ln 2] have s = 2, t = 0, and with d = ln 2
s = 1, t = -ln 2; the last column adds 1 and 0. So log p = -2 ln 2, -2 ln 2, -ln 2, and
H = ln 2 + ln 2 / 2 = 1.04 nats.

The columns of an output layer that is cut along the vocabulary over ranks are tiles, too: each rank
reduces its own, and sums are exchanged.

Shapes: B rows, T tokens, N positions, D width of the hidden states, V vocabulary, C columns of a
tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ludic.models.context_parallel import RowSlice
from ludic.models.flops import reported_products
from ludic.models.output_layer import OutputLayer, Products, VocabularyShard
from ludic.training.loss.logprobs import LogitsUse, select_logp_and_entropy, selective_log_softmax

TILE_ELEMENTS = 1 << 22
"""Number of logits in a tile: 16 MiB in float32."""
GPU_TILE_ELEMENTS = 1 << 24
"""The least number of logits on a GPU: there an operation on a small tile is mostly its start."""
LEAST_COLUMNS = 64
TOKEN_SCORES = "token_scores"
"""Name of the `TokenScores` of a batch whose logits were not computed."""


class TokenScores:
    """Log-probabilities and entropy of each next token of a batch; computed when they are first
    read."""

    def __init__(
        self,
        hidden: Tensor,
        layer: OutputLayer,
        input_ids: Tensor,
        *,
        mask: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        places: Tensor | None = None,
        part: RowSlice | None = None,
        anchor: Tensor | None = None,
    ) -> None:
        """hidden [B, T, D]: the inputs of the output layer; input_ids [B, T]. mask [B, T]: only
        next tokens at which it is not 0 have scores, the others have 0. None means all.
        `temperature`: the policy is softmax(logits / temperature). `with_entropy`: the entropy will
        be read, and is computed together with the log-probabilities. places [B * T]: where the
        hidden state of each token is in the row. None means at its own place. `part`: `hidden`
        [1, w, D] is this rank's slice of the row, and the results are joined. anchor [B, 0, V]: the
        model's output, for backward hooks that wait for a gradient of it, as in FSDP2."""
        self.anchor, self.part = anchor, part
        self.hidden, self.layer, self.input_ids, self.places = hidden, layer, input_ids, places
        self.mask, self.temperature, self.with_entropy = mask, temperature, with_entropy

    @property
    def placeholder(self) -> Tensor:
        """[B, T, V] nan, which takes no memory: the logits that were not computed."""
        return self.hidden.new_full((), torch.nan).expand(*self.input_ids.shape, len(self.layer.weight))

    @cached_property
    def logp(self) -> Tensor:
        """[B, T - 1] log-probability of each next token, float32."""
        return self._spread(self._computed[0])

    @cached_property
    def entropy(self) -> Tensor:
        """[B, T - 1] entropy of the distribution of each next token, in nats, float32."""
        return self._spread(self._computed[1] if self.with_entropy else self._compute(with_entropy=True)[1])

    @cached_property
    def _computed(self) -> tuple[Tensor, Tensor]:
        return self._compute(with_entropy=self.with_entropy)

    def _compute(self, *, with_entropy: bool) -> tuple[Tensor, Tensor]:
        # Shifted value i of rows of T - 1 values belongs to hidden state i + i // (T - 1) of rows
        # of T. Example: T = 3, values 0 1 | 2 3, states 0 1 . | 3 4 .
        states = self._positions + self._positions // (self.input_ids.shape[1] - 1)
        places_N = states if self.places is None else self.places[states]
        index_N, states = self.input_ids[:, 1:].flatten()[self._positions], self.hidden.flatten(0, 1)
        if self.part is None:
            return self._score(states.index_select(0, places_N), index_N, with_entropy)
        own = self.part.find_own(places_N)
        scored = self._score(states.index_select(0, places_N[own] - self.part.start), index_N[own], with_entropy)
        logp_N, entropy_N = (self.part.add(each.new_zeros(len(index_N)).index_copy(0, own, each)) for each in scored)
        return logp_N, entropy_N

    def _score(self, chosen_ND: Tensor, index_N: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
        products = self.layer.products(chosen_ND)
        logp_N, entropy_N = compute_scores(self.layer, products, index_N, temperature=self.temperature, with_entropy=with_entropy)
        if self.anchor is None:
            return logp_N, entropy_N
        zero = self.anchor.sum().to(logp_N.dtype)
        return logp_N + zero, entropy_N + zero

    @cached_property
    def _positions(self) -> Tensor:
        """[N] index of the scored tokens into the flattened [B, T - 1] values."""
        shifted = self.input_ids[:, 1:]
        if self.mask is None:
            return torch.arange(shifted.numel(), device=shifted.device)
        return self.mask[:, 1:].flatten().nonzero().squeeze(1)

    def _spread(self, values_N: Tensor) -> Tensor:
        shape = self.input_ids[:, 1:].shape
        return values_N.new_zeros(shape.numel()).index_copy(0, self._positions, values_N).view(shape)


class LogitScores(TokenScores):
    """The same from logits that the model computed for another row than the row of the samples."""

    def __init__(
        self,
        logits: Tensor,
        input_ids: Tensor,
        places: Tensor | None,
        *,
        part: RowSlice | None = None,
        mask: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        wide: bool = True,
    ) -> None:
        """logits [1, U, V], or with `part` [1, w, V]; input_ids [B, T]; places [B * T]: where the
        logits of each token are. `wide`: compute in float32 for logits of any dtype."""
        self.hidden, self.input_ids, self.places, self.part = logits, input_ids, places, part
        self.mask, self.temperature, self.with_entropy, self.wide = mask, temperature, with_entropy, wide

    @property
    def placeholder(self) -> Tensor:
        """[B, T, V] nan, which takes no memory."""
        return self.hidden.new_full((), torch.nan).expand(*self.input_ids.shape, self.hidden.shape[-1])

    def _score(self, chosen_ND: Tensor, index_N: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
        # The chosen logits are a copy, which nothing else reads.
        use = LogitsUse(consume=True, wide=self.wide, temperature=self.temperature)
        if with_entropy:
            return select_logp_and_entropy(chosen_ND, index_N, use=use)
        logp = selective_log_softmax(chosen_ND, index_N, use=use)
        return logp, torch.zeros_like(logp)


def compute_scores(
    layer: OutputLayer, products: Products, index_N: Tensor, *, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """[N] log-probability of the tokens `index_N`, and [N] entropy of their distributions, in
    float32, or float64 for a model in float64. The entropy is 0 unless `with_entropy`.

    The gradient is exact, with respect to inputs, weights and bias.
    """
    device = products.inputs[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    rule = _Rule(layer.scale, layer.cap, temperature, with_entropy, dtype, products.shard)
    index_N = index_N - products.columns.start
    with reported_products(products.inputs, products.weights):
        both: tuple[Tensor, Tensor] = _Scores.apply(rule, index_N, products.bias, *products.inputs, *products.weights)
    return both


@dataclass(frozen=True)
class _Rule:
    """How sums of products become scores."""

    scale: float
    cap: float | None
    temperature: float
    with_entropy: bool
    dtype: torch.dtype | None
    """dtype of the products. None means their own."""
    shard: VocabularyShard | None = None
    """The columns of this rank, if they are not all."""

    def cast(self, tensor: Tensor) -> Tensor:
        return tensor if self.dtype is None else tensor.to(self.dtype)

    def tile(self, products: Products, columns: slice) -> Tensor:
        """[N, C] logits, before the temperature, in float32 or wider. They are rounded to the
        model's dtype, as the model's own logits are."""
        total = _tile_of_sums(self, products, columns)
        if self.scale != 1.0:
            total = total * self.scale
        if self.cap is not None:
            total = torch.tanh(total / self.cap) * self.cap
        return total.to(torch.promote_types(total.dtype, torch.float32))

    def slope(self, tile_NC: Tensor, grad_NC: Tensor) -> Tensor:
        """The gradient with respect to the sums, given that with respect to logits / temperature;
        overwrites it."""
        if self.cap is not None:
            grad_NC.addcmul_(grad_NC, (tile_NC / self.cap).square_(), value=-1.0)
        factor = self.scale / self.temperature
        return grad_NC if factor == 1.0 else grad_NC.mul_(factor)


def _tile_of_sums(rule: _Rule, products: Products, columns: slice) -> Tensor:
    bias = None if products.bias is None else rule.cast(products.bias[columns])
    first, *others = (
        (inputs, rule.cast(weights[columns])) for inputs, weights in zip(products.inputs, products.weights, strict=True)
    )
    total = F.linear(*first, bias)
    for inputs, weights in others:
        total = (total + F.linear(inputs, weights)).to(total.dtype)
    return total


class _Scores(torch.autograd.Function):
    """See the head of this module."""

    @staticmethod
    def forward(ctx: Any, rule: _Rule, index_N: Tensor, bias: Tensor | None, *factors: Tensor) -> tuple[Tensor, Tensor]:
        half = len(factors) // 2
        products = Products(tuple(map(rule.cast, factors[:half])), factors[half:], bias)
        ctx.rule, ctx.input_dtypes = rule, [factor.dtype for factor in factors[:half]]
        with torch.autocast(index_N.device.type, enabled=False):
            logp_N, logsumexp_N, entropy_N = _reduce_tiles(rule, products, index_N)
        ctx.save_for_backward(index_N, logsumexp_N, entropy_N, bias, *products.inputs, *products.weights)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        index_N, logsumexp_N, entropy_N, bias, *factors = ctx.saved_tensors
        half = len(factors) // 2
        products = Products(tuple(factors[:half]), tuple(factors[half:]), bias)
        needs = ctx.needs_input_grad[2:]
        with torch.autocast(index_N.device.type, enabled=False):
            sums = _GradientSums(ctx.rule, products, needs, logsumexp_N.dtype)
            for columns in _tiles(products):
                tile_NC = ctx.rule.tile(products, columns)
                scaled_NC = tile_NC if ctx.rule.temperature == 1.0 else tile_NC / ctx.rule.temperature
                grad_NC = _gradient(scaled_NC, index_N - columns.start, logsumexp_N, entropy_N, grads, ctx.rule.with_entropy)
                sums.add(columns, ctx.rule.slope(tile_NC, grad_NC))
            sums.exchange()
        inputs = (None if grad is None else grad.to(dtype) for grad, dtype in zip(sums.inputs, ctx.input_dtypes, strict=True))
        return None, None, sums.bias, *inputs, *sums.weights


def count_tile_elements(device: torch.device) -> int:
    """The number of logits in a tile on `device`."""
    return TILE_ELEMENTS if device.type == "cpu" else max(TILE_ELEMENTS, GPU_TILE_ELEMENTS)


def _tiles(products: Products) -> list[slice]:
    rows, vocabulary = len(products.inputs[0]), len(products.weights[0])
    columns = max(LEAST_COLUMNS, count_tile_elements(products.weights[0].device) // max(1, rows))
    return [slice(start, min(start + columns, vocabulary)) for start in range(0, vocabulary, columns)]


def _reduce_tiles(rule: _Rule, products: Products, index_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[N] log-probabilities, logsumexp and entropy, all of logits / temperature."""
    dtype = torch.promote_types(products.inputs[0].dtype, torch.float32)
    zeros_N = torch.zeros(index_N.shape, dtype=dtype, device=index_N.device)
    selected_N, largest_N = zeros_N.clone(), torch.full_like(zeros_N, torch.finfo(dtype).min)
    sum_N, weighted_N = zeros_N.clone(), zeros_N.clone()
    for columns in _tiles(products):
        tile_NC = rule.tile(products, columns)
        if rule.temperature != 1.0:
            tile_NC /= rule.temperature
        local_N1, inside_N = _find_in_tile(index_N - columns.start, tile_NC)
        selected_N = torch.where(inside_N, tile_NC.gather(1, local_N1).squeeze(1), selected_N)
        rise_N = largest_N.neg()
        largest_N = torch.maximum(largest_N, tile_NC.amax(dim=1))
        rise_N += largest_N
        decay_N = rise_N.neg().exp_()
        tile_NC -= largest_N[:, None]
        if rule.with_entropy:
            weighted_N = (weighted_N - rise_N * sum_N) * decay_N
            weights_NC = tile_NC.exp()
            sum_N = sum_N * decay_N + weights_NC.sum(dim=1)
            weighted_N += weights_NC.mul_(tile_NC.clamp_(min=torch.finfo(dtype).min)).sum(dim=1)
        else:
            sum_N = sum_N * decay_N + tile_NC.exp_().sum(dim=1)
    if rule.shard is not None:
        rise_N = largest_N.neg()
        largest_N = rule.shard.largest(largest_N)
        rise_N += largest_N
        own_3N = torch.stack([sum_N, weighted_N - rise_N * sum_N, selected_N])
        own_3N[:2] *= rise_N.neg().exp_()
        sum_N, weighted_N, selected_N = rule.shard.add(own_3N)
    log_sum_N = sum_N.log()
    entropy_N = log_sum_N - weighted_N / sum_N if rule.with_entropy else zeros_N
    logsumexp_N = largest_N + log_sum_N
    return selected_N - logsumexp_N, logsumexp_N, entropy_N


def _find_in_tile(local_N: Tensor, tile_NC: Tensor) -> tuple[Tensor, Tensor]:
    """[N, 1] column of each token, clamped into the tile, and [N] whether it is in the tile."""
    last = tile_NC.shape[1] - 1
    return local_N.clamp(0, last)[:, None], (local_N >= 0) & (local_N <= last)


def _gradient(
    tile_NC: Tensor, local_N: Tensor, logsumexp_N: Tensor, entropy_N: Tensor, grads: tuple[Tensor, ...], with_entropy: bool
) -> Tensor:
    """onehot * g - p * g - p (log p + H) * h, where g and h are the gradients of the
    log-probability and of the entropy."""
    logp_grad_N, entropy_grad_N = grads
    logp_NC = tile_NC - logsumexp_N[:, None]
    if with_entropy:
        p_NC = logp_NC.clamp_(min=torch.finfo(logp_NC.dtype).min).exp()
        factor_NC = logp_NC.add_(entropy_N[:, None]).mul_(entropy_grad_N[:, None]).add_(logp_grad_N[:, None])
        grad_NC = factor_NC.mul_(p_NC).neg_()
    else:
        grad_NC = logp_NC.exp_().mul_(-logp_grad_N[:, None])
    local_N1, inside_N = _find_in_tile(local_N, tile_NC)
    return grad_NC.scatter_add_(1, local_N1, (logp_grad_N * inside_N)[:, None])


class _GradientSums:
    """Gradients with respect to inputs, weights and bias; None where none is needed."""

    def __init__(self, rule: _Rule, products: Products, needs: tuple[bool, ...], wide: torch.dtype) -> None:
        self.rule, self.products = rule, products
        half = len(products.inputs)
        self.bias = torch.empty_like(products.bias) if needs[0] and products.bias is not None else None
        self.inputs = [
            torch.zeros_like(each, dtype=wide) if needed else None
            for each, needed in zip(products.inputs, needs[1 : 1 + half], strict=True)
        ]
        self.weights = [
            torch.empty_like(each) if needed else None for each, needed in zip(products.weights, needs[1 + half :], strict=True)
        ]

    def add(self, columns: slice, grad_NC: Tensor) -> None:
        """Add what a tile contributes. Each column of the vocabulary is in one tile."""
        if self.bias is not None:
            self.bias[columns] = grad_NC.sum(dim=0)
        for i, (inputs, weights) in enumerate(zip(self.products.inputs, self.products.weights, strict=True)):
            narrow_NC = grad_NC.to(inputs.dtype)
            input_sum, weight_grad = self.inputs[i], self.weights[i]
            if input_sum is not None:
                part = self.rule.cast(weights[columns])
                if input_sum.dtype == inputs.dtype:
                    input_sum.addmm_(narrow_NC, part)
                else:
                    input_sum += narrow_NC @ part
            if weight_grad is not None:
                weight_grad[columns] = narrow_NC.T @ inputs

    def exchange(self) -> None:
        """Add what the columns of other ranks contribute to the gradient of the inputs."""
        if self.rule.shard is not None:
            for input_sum in self.inputs:
                if input_sum is not None:
                    self.rule.shard.add(input_sum)
