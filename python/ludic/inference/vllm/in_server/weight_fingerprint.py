"""A short fingerprint of each tensor, with which trainer and server compare their weights.

It reads up to 65,536 evenly spread elements of each tensor. This shows whether a tensor arrived and
which one it was; it does not prove that every element is equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

SAMPLED_ELEMENTS = 65_536
"""Maximum number of elements that are read of a tensor."""


def fingerprint(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> 16 hexadecimal digits. Equal bytes, shape and dtype give equal fingerprints, on any
    device."""
    return {name: tensor_fingerprint(tensor) for name, tensor in tensors.items()}


def tensor_fingerprint(tensor: Tensor) -> str:
    """The fingerprint of one tensor.

    Every `step`-th element is read. Example: of 10 elements, at most 4 of which are read, the step
    is 3 and the elements at 0, 3, 6 and 9 are read.
    """
    flat = tensor.detach().reshape(-1)
    step = max(1, -(-flat.numel() // SAMPLED_ELEMENTS))  # rounded up
    sample = flat[::step].contiguous().cpu()
    content = sample.view(torch.uint8).numpy().tobytes() if sample.numel() else b""
    head = f"{tensor.dtype}{list(tensor.shape)}".encode()
    return hashlib.blake2b(head + content, digest_size=8).hexdigest()


class SleepCheck:
    """Compares a server's tensors before and after a sleep. Level 1 keeps all of them, level 2 only
    buffers: the weights are then whatever the memory held.

    >>> check = SleepCheck(2, weights, buffers)   # then it sleeps, and wakes
    >>> check.find_changed(weights, buffers)      # then it gets new weights
    >>> check.find_lost(weights)
    """

    def __init__(self, level: int, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        self._level, self._spoiled = level, False
        self._kept = fingerprint({**buffers, **(weights if level == 1 else {})})

    @torch.no_grad()
    def find_changed(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> list[str]:
        """Names of what the sleep has changed, though it keeps it. The first call after a sleep of
        level 2 makes the weights NaN."""
        if self._level == 2 and not self._spoiled:
            self._spoiled = True
            for weight in weights.values():
                if weight.dtype in (torch.float32, torch.bfloat16, torch.float16):
                    weight.fill_(float("nan"))
        now = {**buffers, **weights}
        return [name for name, digest in self._kept.items() if tensor_fingerprint(now[name]) != digest]

    def find_lost(self, weights: Mapping[str, Tensor]) -> list[str]:
        """Names of weights that a sleep of level 2 has lost, and that were not loaded since."""
        if not self._spoiled:
            return []
        lost = [name for name, weight in weights.items() if weight.is_floating_point() and bool(weight.isnan().any())]
        self._spoiled = bool(lost)
        return lost
