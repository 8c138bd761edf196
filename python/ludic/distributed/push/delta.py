"""What changed since the last push. In bfloat16 and at a learning rate of 1e-6, about 99 % of the
weights keep their bits in a step.

The trainer keeps the weights that all servers loaded last, in host memory and in the servers'
dtypes; each server keeps the same (`ludic.inference.vllm.in_server.weight_receiver`). A push has an
id, by which a delta names its base.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from ludic._core import apply_delta, encode_delta
from ludic.inference.client import Weights

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from ludic.inference.vllm.in_server.weight_receiver import DeltaHeader


class LastPush:
    """The weights that all servers loaded last, under the id of their push."""

    def __init__(self) -> None:
        self.push_id: str | None = None
        """None if it is not known which weights the servers have."""
        self._weights: dict[str, Tensor] = {}

    def start_delta(self, described: Weights) -> Delta | None:
        """A delta from these weights to others with these names, shapes and dtypes. None if they
        have other ones."""
        same = self._weights.keys() == described.keys() and all(
            (own.shape, own.dtype) == (described[name].shape, described[name].dtype) for name, own in self._weights.items()
        )
        return Delta(self.push_id, self._weights) if same and self.push_id is not None else None

    def replace(self, described: Weights) -> None:
        """Forget the weights: each is given to `copy`, and they count once `confirm` is called."""
        self.push_id = None
        self._weights = {name: own for name, own in self._weights.items() if name in described}

    def copy(self, name: str, tensor: Tensor) -> None:
        own = self._weights.get(name)
        if own is not None and (own.shape, own.dtype) == (tensor.shape, tensor.dtype):
            own.copy_(tensor)  # into the memory that it has
        else:
            self._weights[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def confirm(self, push_id: str, delta: Delta | None = None) -> None:
        """All servers have loaded what was copied, or the delta, under this id."""
        if delta is not None:
            delta.apply()
        self.push_id = push_id


class Delta:
    """The changes of weights, one after the other, while they are gathered."""

    def __init__(self, base: str, weights: dict[str, Tensor]) -> None:
        self._base, self._weights = base, weights
        self._changes: dict[str, NDArray[np.uint8]] = {}
        self.push_id = uuid.uuid4().hex
        self.whole_bytes = sum(tensor.nbytes for tensor in weights.values())
        self.bytes = 0

    @property
    def is_smaller(self) -> bool:
        """Whether it has changes, and fewer bytes than the tensors."""
        return 0 < self.bytes < self.whole_bytes

    def add(self, name: str, tensor: Tensor) -> None:
        """Compare a tensor with its base. Nothing is kept once the tensors are smaller."""
        if self.bytes >= self.whole_bytes:
            self._changes.clear()
            return
        from ludic.inference.vllm.in_server.weight_receiver import view_bytes

        new = view_bytes(tensor.detach().cpu().contiguous())
        change = encode_delta(view_bytes(self._weights[name]), new, tensor.itemsize)
        if change is not None:
            self._changes[name] = change
            self.bytes += change.nbytes

    def seal(self) -> tuple[DeltaHeader, Tensor]:
        """The header, and the changes [bytes]."""
        import numpy as np
        import torch

        from ludic.inference.vllm.in_server.weight_receiver import digest_delta

        names, sizes = list(self._changes), [change.nbytes for change in self._changes.values()]
        changes = np.concatenate(list(self._changes.values()))
        digest = digest_delta(self.push_id, self._base, names, sizes, changes)
        return {"base": self._base, "names": names, "sizes": sizes, "digest": digest}, torch.from_numpy(changes)

    def apply(self) -> None:
        """Change the base into the new weights, in place."""
        from ludic.inference.vllm.in_server.weight_receiver import view_bytes

        for name, change in self._changes.items():
            apply_delta(view_bytes(self._weights[name]), change, self._weights[name].itemsize)


def write_delta(folder: Path, changes: Tensor) -> None:
    """Write the changes of a delta [bytes] into the folder of its version."""
    from ludic.inference.vllm.in_server.weight_receiver import DELTA_FILE

    changes.numpy().tofile(folder / DELTA_FILE)
