"""Sums gradients over ranks that each have the whole model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ludic.models.regions import split_in_buckets

BUCKET_BYTES = 64 << 20
"""Gradients that are summed by one message between ranks."""


@torch.no_grad()
def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace each gradient by its sum over all ranks. A rank without a gradient adds 0. All ranks
    call it with the same parameters.

    Gradients of one dtype travel together. Example: 3, 3 and 1 numbers as one message of 7.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        groups.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter.grad)
    for gradients in groups.values():
        sizes = {str(number): gradient.nbytes for number, gradient in enumerate(gradients)}
        for bucket in split_in_buckets(sizes, BUCKET_BYTES):
            _sum_together([gradients[int(number)] for number in bucket])


def _sum_together(gradients: list[Tensor]) -> None:
    if len(gradients) == 1:
        dist.all_reduce(gradients[0])
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, summed in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))
