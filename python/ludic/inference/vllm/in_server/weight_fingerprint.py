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
