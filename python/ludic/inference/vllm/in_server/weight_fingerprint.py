"""A short mark of each tensor's bytes, the same in the trainer and in the server, so that both can
say whether they hold the same.

It reads up to 65,536 elements of each tensor, evenly spread: it tells that a tensor arrived and
which one it was, it does not prove every element.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

SAMPLED_ELEMENTS = 65_536
"""Elements that are read of each tensor, at most."""


def fingerprint(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A mark of 16 hexadecimal digits for each name. Equal bytes, shape and dtype give equal
    marks, on any device."""
    return {name: tensor_fingerprint(tensor) for name, tensor in tensors.items()}


def tensor_fingerprint(tensor: Tensor) -> str:
    """The mark of one tensor."""
    flat = tensor.detach().reshape(-1)
    step = max(1, -(-flat.numel() // SAMPLED_ELEMENTS))
    sample = flat[::step].contiguous().cpu()
    content = sample.view(torch.uint8).numpy().tobytes() if sample.numel() else b""
    head = f"{tensor.dtype}{list(tensor.shape)}".encode()
    return hashlib.blake2b(head + content, digest_size=8).hexdigest()
