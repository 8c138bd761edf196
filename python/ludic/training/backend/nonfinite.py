"""Finds the samples that made a loss or a gradient infinite or NaN. Slow; runs only after that
happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from ludic.training.batching.micro_batching import MicroBatch

MAX_NAMED = 16


def describe_nonfinite(model: nn.Module, micro_batches: Iterable[MicroBatch], backward: Callable[[MicroBatch], Tensor]) -> str:
    """One sentence on the cause. `backward` adds the gradient of a micro-batch and returns its
    loss. Clears all gradients."""
    if not all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
        return "weights were not finite before this step; resume from an earlier checkpoint"
    names = []
    for name in _find_offenders(model, micro_batches, backward):
        names.append(name)
        if len(names) == MAX_NAMED:
            names.append("and possibly more")
            break
    if not names:
        return "every sample alone gives finite values, but their sum overflows; lower lr or max_grad_norm"
    return f"offending samples (rollout/step): {', '.join(names)}"


def _find_offenders(
    model: nn.Module, micro_batches: Iterable[MicroBatch], backward: Callable[[MicroBatch], Tensor]
) -> Iterator[str]:
    for micro_batch in micro_batches:
        if _is_finite(model, micro_batch, backward):
            continue
        for number, part in enumerate(micro_batch.parts()):
            if not _is_finite(model, part, backward):
                yield part.sample_names[0] if part.sample_names else f"row {number}"


def _is_finite(model: nn.Module, micro_batch: MicroBatch, backward: Callable[[MicroBatch], Tensor]) -> bool:
    model.zero_grad(set_to_none=True)
    loss = backward(micro_batch)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    finite = bool(torch.isfinite(loss)) and all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    model.zero_grad(set_to_none=True)
    return finite
