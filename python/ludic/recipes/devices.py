"""The device of a recipe's models. A command that trains chooses it; one that only starts the
processes of a run leaves it to them, since they may be on machines of another kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

AUTO = "auto"
"""The default of `trainer.model_device`: "cuda" if available, else "cpu"."""
SETTINGS = ("trainer.model_device", "warmup.trainer.model_device")


_LEFT_OPEN: ContextVar[bool] = ContextVar("_LEFT_OPEN", default=False)


@contextmanager
def devices_left_open() -> Iterator[None]:
    """Inside the block, a recipe that is composed keeps `auto`, and torch is not imported for it.
    Who opens the block chooses afterwards."""
    token = _LEFT_OPEN.set(True)
    try:
        yield
    finally:
        _LEFT_OPEN.reset(token)


def are_left_open() -> bool:
    """Whether this is inside a block of `devices_left_open`."""
    return _LEFT_OPEN.get()


def choose_devices(recipe: Any) -> None:
    """Replace `auto` by the device of this process, in place."""
    sections = [
        recipe.trainer,
        *([recipe.warmup.trainer] if "warmup" in vars(recipe) and "trainer" in vars(recipe.warmup) else []),
    ]
    for section in sections:
        if section.model_device == AUTO:
            section.model_device = choose_device()


def choose_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
