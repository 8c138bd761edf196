"""The output layer of a causal model, from hidden states to logits, as products that can be
computed for some columns at a time:

    logits = cap * tanh(scale * (sum_i inputs_i @ weights_i^T + bias) / cap)

One product is the layer itself, or the embedding that it is tied to. LoRA adapters add one each,
with inputs x A^T and weights B. `scale` and `cap` are read from the configuration: `logit_scale`
(Cohere), 1 / `logits_scaling` (Granite), `final_logit_softcapping` (Gemma).

A layer that is cut along the vocabulary (tensor-parallel) has the products of this rank's columns.

Shapes: N positions, D width of the hidden states, V vocabulary.

torch's `ColwiseParallel` makes the weights [V, D] of such a layer a DTensor that is cut along V.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ludic.errors import ConfigError
from ludic.models.sharding import find_own_region, get_local, is_sharded
from ludic.models.wrappers import find_text_config, unwrap_transformer

LARGEST_PROBE = 60.0
"""Logits up to this size are sent through what the model does behind its output layer."""


@dataclass(frozen=True)
class Products:
    """The output layer at N positions."""

    inputs: tuple[Tensor, ...]
    """[N, d_i] each; the first has d_0 = D."""
    weights: tuple[Tensor, ...]
    """[V, d_i] each."""
    bias: Tensor | None
    """[V]."""
    shard: VocabularyShard | None = None
    """The columns that `weights` and `bias` are, if they are not all: V is then their number."""

    @property
    def columns(self) -> slice:
        """Where the columns of `weights` are in the vocabulary."""
        start = 0 if self.shard is None else self.shard.start
        return slice(start, start + len(self.weights[0]))


@dataclass(frozen=True)
class OutputLayer:
    """The module, and what the model does with its output."""

    module: nn.Module
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, model: nn.Module) -> OutputLayer:
        """The output layer of a transformers model, with or without adapters and wrappers. Raises
        ConfigError for a model without one and for a layer of another kind than those above."""
        inner = unwrap_transformer(model)
        module = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
        if module is None:
            raise ConfigError(f"{type(inner).__name__} has no output layer (get_output_embeddings)")
        config = find_text_config(model)
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        if not isinstance(scale, int | float):
            raise ConfigError(f"logit_scale ({scale!r}) of {type(inner).__name__} is not a number")
        layer = cls(module, float(scale), getattr(config, "final_logit_softcapping", None) or None)
        weight = layer.weight
        if isinstance(weight, DTensor) and not is_sharded(model):
            VocabularyShard.of(weight)
        return layer

    @property
    def weight(self) -> Tensor:
        """[V, D] weights of the layer without adapters; of a sharded one a DTensor."""
        return _read_layer(self.module)[0].weight

    def products(self, hidden: Tensor) -> Products:
        """The layer at [N, D] hidden states. Adapters apply their dropout here. The weights of a
        model sharded by FSDP2 must be whole (`models.sharding.unshard`)."""
        linear, adapters = _read_layer(self.module)
        if isinstance(linear.weight, DTensor):
            if adapters:
                raise ConfigError("the output layer is cut along the vocabulary, and has adapters")
            bias = None if linear.bias is None else get_local(linear.bias)
            return Products((hidden,), (linear.weight.to_local(),), bias, VocabularyShard.of(linear.weight))
        inputs, weights = [hidden], [linear.weight]
        for down, up, scaling, dropout in adapters:
            inputs.append(down(dropout(hidden.to(down.weight.dtype))) * scaling)
            weights.append(up.weight)
        return Products(tuple(inputs), tuple(weights), linear.bias)

    def transform(self, values: Tensor) -> Tensor:
        """Scale and cap the output of the layer, of any shape."""
        scaled = values if self.scale == 1.0 else values * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap

    @contextmanager
    def captured_inputs(self, *, skip: bool) -> Iterator[list[Tensor]]:
        """A list that gets the layer's inputs when the model runs in this thread inside. `skip`:
        the layer itself computes nothing, and the model's logits are empty: [B, 0, V]. They depend
        on the layer's inputs, not on its weights. A layer that is cut along the vocabulary computes
        one token of one row."""
        seen: list[Tensor] = []
        owner = threading.get_ident()  # another thread may sample from the same model

        def capture(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if threading.get_ident() != owner:
                return None
            seen.append(inputs[0])
            if not skip:
                return None
            first = 1 if isinstance(self.weight, DTensor) else 0  # torch cannot place products of no rows
            return (inputs[0][:first, :first] if first else inputs[0][:, :0], *inputs[1:])

        def detach(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if threading.get_ident() != owner or any(isinstance(each, DTensor) for each in (inputs[0], output)):
                return None
            return output.detach() + inputs[0][..., :1]

        hooks = [self.module.register_forward_pre_hook(capture)]
        if skip:
            hooks.append(self.module.register_forward_hook(detach))
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def replaced_output(self, values: Tensor) -> Iterator[None]:
        """Inside, the layer returns `values` in this thread: the model shows what it does with
        them."""
        owner = threading.get_ident()
        hook = self.module.register_forward_hook(lambda *_: values if threading.get_ident() == owner else None)
        try:
            yield
        finally:
            hook.remove()

    def probe(self, positions: int) -> Tensor:
        """[1, positions, V] float32 values as the layer could return them, small and large ones."""
        weight = self.weight
        row = torch.linspace(-LARGEST_PROBE, LARGEST_PROBE, len(weight), dtype=torch.float32, device=weight.device)
        return row.expand(1, positions, -1)


Adapter = tuple[nn.Linear, nn.Linear, float, nn.Module]
"""The maps A [r, D] and B [V, r], the factor of their product, and the dropout of its input."""


def _read_layer(module: Any) -> tuple[nn.Linear, list[Adapter]]:
    """The linear layer and its active adapters. Raises ConfigError for any other module."""
    if _is_peft(module, "ModulesToSaveWrapper"):
        known = all(name in module.modules_to_save for name in module.active_adapters)
        if module.disable_adapters or not module.active_adapters or not known:
            return _read_layer(module.original_module)
        return _read_layer(module.modules_to_save[module.active_adapters[0]])
    if not _is_peft(module, "Linear"):
        if type(module) is not nn.Linear and not (is_sharded(module) and nn.Linear in type(module).__bases__):
            raise ConfigError(f"the output layer is a {type(module).__module__}.{type(module).__name__}, not a Linear")
        return module, []
    linear, _ = _read_layer(module.base_layer)
    if any(name in module.lora_variant or module.lora_B[name].bias is not None for name in module.lora_A):
        raise ConfigError("the output layer has adapters other than plain LoRA")  # also while they are off
    if module.disable_adapters or module.merged:
        return linear, []
    names = [name for name in module.active_adapters if name in module.lora_A]
    return linear, [(module.lora_A[name], module.lora_B[name], module.scaling[name], module.lora_dropout[name]) for name in names]


def _is_peft(module: object, name: str) -> bool:
    kind = type(module)
    return kind.__name__ == name and kind.__module__.startswith("peft.")


@dataclass(frozen=True)
class VocabularyShard:
    """Where the columns of this rank begin, and the ranks that have the others."""

    start: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, weight: DTensor) -> VocabularyShard:
        """The shard of [V, D] weights. Raises ConfigError for weights that are cut another way."""
        if weight.device_mesh.ndim != 1 or weight.placements != (Shard(0),):
            raise ConfigError(f"the output layer has {weight.placements}; cut its vocabulary over one mesh dimension")
        return cls(find_own_region(weight)[0][0], weight.device_mesh.get_group())

    def add(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place. All ranks of the group call it."""
        dist.all_reduce(values, group=self.group)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """The elementwise maximum over ranks. All ranks of the group call it."""
        result = values.clone()
        dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self.group)
        return result
