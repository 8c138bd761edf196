"""The model FLOPs of forward and backward passes.

Every `MEASURED_EVERY`-th pass of a kind is measured: a `TorchFunctionMode` sees each matrix product
that Python code requests, with its shapes, whatever the architecture: linear layers and GPT-2's
Conv1D, the experts that a token is routed to, attention by matmul or by sdpa. A product
[M, K] x [K, N] has 2 M N K FLOPs. Its backward pass has the same number for each factor that needs
a gradient: none for frozen weights under LoRA. The passes between are calculated: products with
weights grow with the tokens, attention over rows [B, T] with B T^2. Attention within packed
sequences and prefix trees, and the output layer at selected tokens, report their sizes in every
pass. (Watching every pass costs 1 to 9 % of a small model's passes on a CPU.)

What is computed counts: a token of a shared prefix once, padding too, an expert only for its
tokens. They are *model* FLOPs, as in PaLM (Chowdhery et al. 2022, appendix B): what the backward
pass computes again (activation checkpointing, scores in fused attention, tiles of chunked logits)
is not counted. Attention has all pairs of queries and keys of a sequence, not the causal half.
`torch.utils.flop_counter.FlopCounterMode` counts the same if attention runs by sdpa's `MATH`
kernel, experts by `eager`, and nothing is computed again: it counts no fused attention on the CPU
and no grouped product.

Modules that torch has compiled do not run the Python code that this reads: nothing is counted.
`nn.MultiheadAttention` is not counted, nor are kernels that are called past torch, except the
attention kernels here and transformers' flash and flex attention.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

MEASURED_EVERY = 64
"""Passes of one kind from a measured one to the next: it takes up to a tenth longer."""

_active = threading.local()


class FlopCounter:
    """Adds up the FLOPs of the passes of one model.

    >>> counter = FlopCounter(model)
    >>> with counter.counting("loss", tokens=256, pairs=256 * 64, backward=True):
    ...     loss = model(input_ids=ids).logits.mean()  # ids [4, 64]; backward may follow outside
    >>> counter.total
    """

    def __init__(self, model: nn.Module) -> None:
        self.total = 0.0
        """FLOPs so far; only grows."""
        self.dtype: torch.dtype | None = None
        """In which most products are computed; None before the first pass."""
        self._model = model
        self._kinds: dict[Hashable, _Kind] = {}

    @cached_property
    def is_exact(self) -> bool:
        """Whether there is anything to count: False for compiled modules."""
        inner = self._model.modules()
        return not any(each._compiled_call_impl is not None or hasattr(each, "_orig_mod") for each in inner)

    @contextmanager
    def counting(self, kind: Hashable, *, tokens: int, pairs: int, backward: bool) -> Iterator[None]:
        """Count what this thread computes inside. Samplers in other threads are not counted. Passes
        of one `kind` differ only in their sizes: `tokens`, and `pairs` of a query and a key.
        `backward`: with the backward pass."""
        if not self.is_exact:
            yield
            return
        known = self._kinds.setdefault(kind, _Kind())
        is_measured = known.passes % MEASURED_EVERY == 0
        pass_ = _Pass(backward)
        before, _active.pass_ = _current(), pass_
        try:
            with pass_ if is_measured else nullcontext():
                yield
        finally:
            _active.pass_ = before
        known.passes += 1
        if is_measured:
            if pass_.by_dtype:
                self.dtype = pass_.by_dtype.most_common(1)[0][0]
            known.per_token, known.per_pair = pass_.of_tokens / max(tokens, 1), pass_.of_pairs / max(pairs, 1)
        self.total += pass_.reported + known.per_token * tokens + known.per_pair * pairs


@dataclass
class _Kind:
    """What the last measured pass of a kind found."""

    passes: int = 0
    per_token: float = 0.0
    per_pair: float = 0.0


class _Pass(TorchFunctionMode):
    """One pass. As a context it sees all products; what is reported, it gets in any case."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.backward = backward
        self.reported = self.of_tokens = self.of_pairs = 0
        self.by_dtype: Counter[torch.dtype] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args) if kwargs is None else func(*args, **kwargs)
        rule = _RULES.get(func)
        if rule is not None:
            before = self.of_tokens + self.of_pairs
            rule(self, result, *args, **(kwargs or {}))
            self.by_dtype[result.dtype] += self.of_tokens + self.of_pairs - before
        return result

    def product(self, flops: int, *factors: Tensor) -> int:
        """FLOPs of a product with the gradients of its factors."""
        return flops * (1 + sum(each.requires_grad for each in factors)) if self.backward else flops

    def attention(self, pairs: int, query: Tensor, key: Tensor, value: Tensor) -> int:
        """FLOPs of the scores and of the weighted sum. `pairs` over all heads; tensors [..., D]."""
        both = int(query.requires_grad) + int(key.requires_grad) if self.backward else 0
        last = int(both > 0) + int(value.requires_grad) if self.backward else 0
        return 2 * pairs * (query.shape[-1] * (1 + both) + value.shape[-1] * (1 + last))


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    return [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]


def _add_product(pass_: _Pass, result: Tensor, *args: Any, **kwargs: Any) -> None:
    """[..., M, K] times [..., K, N]. Two batches of matrices are the scores of attention, or their
    weighted sum."""
    a, b, *_ = _tensors(args, kwargs)
    flops = pass_.product(2 * result.numel() * a.shape[-1], a, b)
    if a.ndim > 2 and b.ndim > 2 and a.shape[-1] > 1:  # the angles of rotary positions are outer products
        pass_.of_pairs += flops
    else:
        pass_.of_tokens += flops


def _add_linear(pass_: _Pass, result: Tensor, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
    pass_.of_tokens += pass_.product(2 * _local(result).numel() * _local(weight).shape[-1], input, weight)


def _add_sum(pass_: _Pass, result: Tensor, *args: Any, **kwargs: Any) -> None:
    """A product that is added to the first tensor."""
    _add_product(pass_, result, *_tensors(args, kwargs)[1:])


def _add_grouped(pass_: _Pass, result: Tensor, *args: Any, **kwargs: Any) -> None:
    """Rows [N, K], each times the matrix [K, M] of its group."""
    a, b, *_ = _tensors(args, kwargs)
    pass_.of_tokens += pass_.product(2 * result.numel() * a.shape[-1], a, b)


def _add_convolution(pass_: _Pass, result: Tensor, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
    pass_.of_tokens += pass_.product(2 * result.numel() * prod(weight.shape[1:]), input, weight)


def _add_einsum(pass_: _Pass, result: Tensor, equation: Any = None, *operands: Any, **__: Any) -> None:
    """Of two tensors: bhqd,bhkd->bhqk sums over d."""
    tensors = operands[0] if len(operands) == 1 and not isinstance(operands[0], Tensor) else operands
    left, _, right = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
    if len(tensors) != 2 or "." in left or not right:
        return
    sizes = dict(zip(left.replace(",", ""), (*tensors[0].shape, *tensors[1].shape), strict=True))
    summed = prod(size for label, size in sizes.items() if label not in right)
    flops = pass_.product(2 * result.numel() * summed, *tensors)
    if all(each.ndim > 2 for each in tensors):
        pass_.of_pairs += flops
    else:
        pass_.of_tokens += flops


def _add_sdpa(pass_: _Pass, result: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> None:
    pass_.of_pairs += pass_.attention(prod(result.shape[:-1]) * key.shape[-2], query, key, value)


_RULES: dict[Any, Callable[..., None]] = {
    F.linear: _add_linear,
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm), _add_product),
    **dict.fromkeys((Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__), _add_product),
    Tensor.__rmatmul__: lambda pass_, result, b, a: _add_product(pass_, result, a, b),
    **dict.fromkeys((torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm), _add_sum),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _add_convolution),
    torch.einsum: _add_einsum,
    F.scaled_dot_product_attention: _add_sdpa,
}
_GROUPED = [(F, "grouped_mm"), (torch, "_grouped_mm")]  # newer and older torch
_RULES |= {getattr(module, name): _add_grouped for module, name in _GROUPED if hasattr(module, name)}


def _local(tensor: Tensor) -> Tensor:
    """The part that this rank computes with, of a layer that is cut over ranks."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _current() -> _Pass | None:
    return getattr(_active, "pass_", None)


@contextmanager
def counting_forward_alone() -> Iterator[None]:
    """Count no backward pass of what this thread computes inside: frozen layers below a head."""
    pass_ = _current() or _Pass(backward=False)
    before, pass_.backward = pass_.backward, False
    try:
        yield
    finally:
        pass_.backward = before


@contextmanager
def _unwatched() -> Iterator[None]:
    with torch._C.DisableTorchFunction():
        yield


def reported_attention(pairs: Callable[[], int], query: Tensor, key: Tensor, value: Tensor) -> AbstractContextManager[None]:
    """A context for attention whose size is not B T^2. `pairs` of a query and a key, of one head;
    called only while something is counted. `query` [B, H, S, D], `key` and `value`
    [B, H_kv, S, D]."""
    pass_ = None if torch.compiler.is_compiling() else _current()
    if pass_ is None:
        return nullcontext()
    pass_.reported += pass_.attention(pairs() * query.shape[1], query, key, value)
    return _unwatched()


def reported_products(inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> AbstractContextManager[None]:
    """A context for the products of `inputs` [N, K] and `weights` [M, K], where N is no fixed share
    of the tokens."""
    pass_ = None if torch.compiler.is_compiling() else _current()
    if pass_ is None:
        return nullcontext()
    for each, weight in zip(inputs, weights, strict=True):
        pass_.reported += pass_.product(2 * each.shape[0] * weight.numel(), each, weight)
    return _unwatched()
