"""Evaluation or training mode inside a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn


def evaluation_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Evaluation mode inside. Afterwards each module has the mode it had: a frozen part that was in
    evaluation mode stays in it, which `model.train()` would not do."""
    return _mode(model, training=False)


def training_mode(model: nn.Module) -> AbstractContextManager[None]:
    """Training mode of all modules inside. Afterwards each module has the mode it had."""
    return _mode(model, training=True)


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    changed = [module for module in model.modules() if module.training != training]
    for module in changed:
        module.training = training
    try:
        yield
    finally:
        for module in changed:
            module.training = not training
