"""Evaluation or training mode inside a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside. Afterwards each module has the mode it had: a frozen part that was in
    evaluation mode stays in it, which `model.train()` would not do."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Training mode of all modules inside. Afterwards each module has the mode it had."""
    evaluating = [module for module in model.modules() if not module.training]
    for module in evaluating:
        module.training = True
    try:
        yield
    finally:
        for module in evaluating:
            module.training = False
