"""The head of a model that scores: the layer from hidden states to rewards or classes, found by
its name; and the scores of samples that are concatenated in one row.

A classifier of transformers reads one score in each row, at its last token. Here its head computes
a score at every token, and each sample is read at its own last token, as in a row of its own.

Shapes: B samples, S tokens of all samples, U tokens of the row, which may be a prefix tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import ConfigError
from ludic.models.names import HEAD_NAMES
from ludic.models.prefix_trees import PREFIX_TREES, PrefixTrees
from ludic.models.wrappers import count_vocabulary, is_classifier, unwrap_transformer


def find_head(model: nn.Module) -> str | None:
    """Full name of the first of `HEAD_NAMES` that the model has, the outermost if there are
    several; None for a model without a head.

    An `lm_head` counts only if it has fewer rows than the token embedding: otherwise it gives the
    logits of the vocabulary.
    """
    named = dict(model.named_modules())
    for head in HEAD_NAMES:
        matches = sorted((name for name in named if name.rpartition(".")[2] == head), key=lambda name: name.count("."))
        if not matches:
            continue
        rows = max((each.shape[0] for each in named[matches[0]].parameters() if each.ndim == 2), default=0)
        if head != "lm_head" or not 0 < count_vocabulary(model) <= rows:
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


def is_in_module(name: str, module: str) -> bool:
    """Whether the parameter `name` belongs to the module of that full name."""
    return name.startswith(f"{module}.")


@contextmanager
def captured_head(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Inside, every call of the head of a classifier adds its input [.., D] and its output."""
    inner = unwrap_transformer(model)
    name = find_head(inner)
    if name is None:
        raise ConfigError(f"{type(inner).__name__} has no head that scores")
    seen: list[tuple[Tensor, Tensor]] = []
    handle = inner.get_submodule(name).register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    try:
        yield seen
    finally:
        handle.remove()


def find_padding(model: nn.Module) -> int | None:
    """The padding token of a transformers model, which its classifier does not score."""
    pad: int | None = unwrap_transformer(model).config.get_text_config().pad_token_id
    return pad


def reads_last_token(model: nn.Module, scores: Tensor, pooled: Tensor, input_ids: Tensor) -> bool:
    """Whether `pooled` [B, K], what the classifier returns for rows `input_ids` [B, T], are the
    `scores` [B, T, K] of its head at each row's last token that is not padding."""
    place = torch.arange(input_ids.shape[1], device=input_ids.device)
    pad = find_padding(model)
    last = (place if pad is None else place * (input_ids != pad)).expand_as(input_ids).amax(dim=1)
    return scores.shape[:2] == input_ids.shape and torch.equal(scores[torch.arange(len(last)), last], pooled)


def select_scores(scores: Tensor, batch: Mapping[str, Any], pad_token_id: int | None) -> Tensor:
    """[B, K] from `scores` [1, U, K], the row that the model computed for the padding-free
    `batch`. A sample is read at its last token that is not padding, as transformers does; at its
    first if all are.

    Example: samples 5 6 0 | 7 in a row of its own each, with the padding token 0, are read at the
    places 1 and 3.
    """
    bounds = batch["cu_seqlens"].long()
    starts, lengths = bounds[:-1], bounds.diff()
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=bounds.device), lengths)
    position = torch.arange(len(sample), device=bounds.device) - starts[sample]
    if pad_token_id is not None:
        position = position * (batch["input_ids"][0] != pad_token_id)
    last = torch.zeros_like(lengths).scatter_reduce(0, sample, position, "amax")
    trees: PrefixTrees | None = batch.get(PREFIX_TREES)
    places = starts + last if trees is None else trees.places[starts + last]
    if scores.ndim != 3 or scores.shape[:2] != (1, len(sample) if trees is None else trees.input_ids.numel()):
        raise ConfigError(f"the head scores {tuple(scores.shape)}, not each token of a row")
    return scores[0].index_select(0, places)
