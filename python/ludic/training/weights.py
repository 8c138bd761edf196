"""The weights that a policy server needs, by name: those trained, with adapters merged into what they adapt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

ParamFilter = Callable[[str, Tensor], bool]
"""Whether a parameter of this name is published."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a wrapper such as DistributedDataParallel."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


def published_weights(
    model: nn.Module, *, param_filter: ParamFilter | None = None, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """Parameters by name, detached: the trainable ones, or all of them for a model with adapters.

    They share the model's memory where they can. Merged weights are copies, since the adapters are taken out again.
    """
    model = unwrapped(model)
    adapted = hasattr(model, "merge_adapter")
    with _merged_adapters(model):
        return {
            name: _exported(parameter, device, copy=adapted)
            for name, parameter in model.named_parameters()
            if (adapted or parameter.requires_grad) and (param_filter is None or param_filter(name, parameter))
        }


def _exported(parameter: Tensor, device: torch.device | str | None, *, copy: bool) -> Tensor:
    whole = parameter.detach()
    if hasattr(whole, "full_tensor"):  # sharded: a collective, taken by every rank
        whole = whole.full_tensor()
    moved = whole if device is None else whole.to(device)
    return moved.clone() if copy and moved is whole else moved


@contextmanager
def _merged_adapters(model: Any) -> Iterator[None]:
    """Adapters merged inside, and every weight bit for bit what it was after: subtracting what was added is not exact."""
    if not hasattr(model, "merge_adapter"):
        yield
        return
    bases = {name: p.detach().clone() for name, p in model.named_parameters() if "base_layer" in name}
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in bases:
                    parameter.copy_(bases[name])
