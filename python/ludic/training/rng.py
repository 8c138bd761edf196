"""The random generators of Python, numpy and torch: seeds, and states as JSON values."""

from __future__ import annotations

import base64
import hashlib
import random
import types
from collections.abc import Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")


def seed_everything(seed: int) -> None:
    """Seed Python and torch: two runs of one recipe draw the same weights, data and samples."""
    random.seed(seed)
    torch.manual_seed(seed)


def seed_phase(seed: int, phase: str) -> None:
    """Seed Python, numpy and torch by the seed and the phase alone: a phase draws the same
    numbers whatever was drawn before it, also when it is resumed in another process."""
    derived = int.from_bytes(hashlib.sha256(f"{seed} {phase}".encode()).digest()[:4], "little")
    random.seed(derived)
    np.random.seed(derived)
    torch.manual_seed(derived)


def rng_state() -> dict[str, Any]:
    """Return the current states."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, _encode(np.asarray(keys, dtype=np.uint32).tobytes()), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state().numpy().tobytes()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [_encode(device.numpy().tobytes()) for device in torch.cuda.get_rng_state_all()]
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the states from `rng_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(_decode(keys), dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        for index, device in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(device), index)


def reseed_for_rank(rank: int) -> None:
    """Give this rank generators of its own, which follow from the present ones and the rank. All
    ranks have the same before."""
    base = int(torch.randint(2**31, (1,)))
    random.seed(f"{base} {rank}")
    np.random.seed((base + rank) % 2**32)
    torch.manual_seed(base + rank)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the generators afterwards, so that draws inside do not change later draws."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


@types.coroutine
def await_preserving_rng(work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Await `work` with the generators restored whenever it pauses, and at its end: its draws do
    not change the draws of other tasks, and theirs are not undone."""
    error: BaseException | None = None
    value: Any = None
    while True:
        try:
            with preserved_rng():
                pause = work.send(value) if error is None else work.throw(error)
        except StopIteration as done:
            result: T = done.value
            return result
        value = error = None
        try:
            value = yield pause
        except BaseException as thrown:
            error = thrown


def _encode(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _decode(text: str) -> bytes:
    return base64.b64decode(text)


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(_decode(text)), dtype=torch.uint8)
