"""Wrappers, kinds and modes of a model: data parallelism, adapters, classifiers, the config and the
vocabulary of its language model, and evaluation or training mode inside a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside a wrapper such as DistributedDataParallel."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


def unwrap_transformer(model: Any) -> Any:
    """The model inside of wrappers for data parallelism and adapters."""
    inner: Any = unwrap_model(model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def find_text_config(model: Any) -> Any:
    """The config of a transformers model; of one that sees images too, of its language model. None
    for other modules."""
    config: Any = getattr(unwrap_transformer(model), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def has_adapters(model: nn.Module) -> bool:
    """Whether the model has adapters of PEFT."""
    return hasattr(model, "peft_config")


def is_classifier(model: Any) -> bool:
    """Whether it is a transformers model for sequence classification, with or without adapters."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside of PEFT's model
    return any(kind.__name__.endswith("ForSequenceClassification") for kind in type(model).__mro__)


def count_vocabulary(model: Any) -> int:
    """Rows of the token embedding; if the model does not name it, of its largest embedding."""
    if hasattr(model, "get_input_embeddings"):
        return int(model.get_input_embeddings().weight.shape[0])
    return max((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=0)


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
