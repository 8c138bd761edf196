"""The head of a model that scores: the layer from hidden states to rewards or classes, found by
its name."""

from __future__ import annotations

from typing import Any

from torch import nn

from ludic.models.names import HEAD_NAMES


def find_head(model: nn.Module) -> str | None:
    """Full name of the first of `HEAD_NAMES` that the model has, the outermost if there are
    several; None for a model without a head.

    An `lm_head` counts only if it has fewer rows than the token embedding: otherwise it gives the
    logits of the vocabulary.
    """
    named = dict(model.named_modules())
    for head in HEAD_NAMES:
        matches = sorted((name for name in named if name.rpartition(".")[2] == head), key=lambda name: name.count("."))
        if matches and not (head == "lm_head" and _gives_vocabulary(named[matches[0]], model)):
            return matches[0]
    return None


def find_head_parts(model: nn.Module) -> list[str]:
    """Full names of the head and then of the other layers that a classifier of transformers has
    outside of its backbone, such as the `head` of ModernBERT or the `pooler` of DeBERTa-v2.
    Empty for a model without a head."""
    head = find_head(model)
    if head is None:
        return []
    place = head.rpartition(".")[0]
    owner = model.get_submodule(place) if place else model
    beside = [f"{place}.{name}" if place else name for name in find_layers_outside_backbone(owner)]
    return [head, *(name for name in beside if name != head)] if is_classifier(owner) else [head]


def find_layers_outside_backbone(model: nn.Module) -> list[str]:
    """Names of the direct children with weights, except the backbone of a transformers model."""
    backbone = getattr(model, "base_model_prefix", None)
    return [name for name, child in model.named_children() if name != backbone and any(True for _ in child.parameters())]


def is_classifier(model: Any) -> bool:
    """Whether it is a transformers model for sequence classification, with or without adapters."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside of PEFT's model
    return any(kind.__name__.endswith("ForSequenceClassification") for kind in type(model).__mro__)


def _gives_vocabulary(head: nn.Module, model: nn.Module) -> bool:
    rows = max((parameter.shape[0] for parameter in head.parameters() if parameter.ndim == 2), default=0)
    return 0 < count_vocabulary(model) <= rows


def count_vocabulary(model: Any) -> int:
    """Rows of the token embedding; if the model does not name it, of its largest embedding."""
    if hasattr(model, "get_input_embeddings"):
        return int(model.get_input_embeddings().weight.shape[0])
    return max((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=0)


def is_in_module(name: str, module: str) -> bool:
    """Whether the parameter `name` belongs to the module of that full name."""
    return name.startswith(f"{module}.")
