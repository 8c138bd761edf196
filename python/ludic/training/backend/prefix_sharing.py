"""Decides whether a model computes rows of prefix trees (`batching.tree_batches`); if not, samples
have rows of their own.

The choice depends on the settings, the model and, in passes with gradient, the loss, so it is the
same on all ranks and after a resume.
"""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from ludic import _core
from ludic.errors import ConfigError
from ludic.models.evaluation_mode import evaluation_mode, training_mode
from ludic.models.heads import is_classifier
from ludic.models.packed_attention import (
    OWN,
    PACKED,
    get_attention,
    hides_windows,
    read_text_config,
    set_attention,
    unwrap_transformer,
)
from ludic.models.prefix_trees import PREFIX_FLEX, PREFIX_TREES, PrefixTrees
from ludic.models.sample_scores import captured_head, reads_last_token
from ludic.training.algorithm import Batch, RLAlgorithm, forward_logits
from ludic.training.backend.precision import autocast
from ludic.training.config import TrainerConfig
from ludic.training.loss.base import adapted_loss, loss_name
from ludic.training.ranks.collectives import max_over_ranks
from ludic.training.rng import preserved_rng

logger = logging.getLogger(__name__)

DIFFERENCE = 0.05
"""How much the logits of a tree may differ from those of separate rows, as a fraction of the change
by another first token. Rounding errors are smaller."""
SAMPLES = ([1, 2, 1, 2, 2, 1, 1, 2], [1, 2, 1, 2, 1, 1], [1, 2, 2, 2, 1], [2, 2, 1, 2, 2, 1, 1, 2])
"""A tree of three samples, and the first of them with another first token."""
_said: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()
"""The reasons that have been logged."""


def can_compute_trees(model: nn.Module, cfg: TrainerConfig) -> bool:
    """Whether `model` computes rows of prefix trees. One with sdpa gets the attention function of
    packed sequences. If not, one line says why: a warning with `prefix_sharing="tree"`. Runs the
    model on a few tokens; all ranks call it."""
    if cfg.prefix_sharing == "off":
        return False
    reason = _prepare(model, cfg)
    if any(max_over_ranks([float(reason is not None)], cfg.model_device)):  # all ranks divide a batch in one way
        reason = reason or "another rank cannot share them"
    explain_rows(reason, model, cfg)
    return reason is None


def can_train_on_trees(model: nn.Module, algo: RLAlgorithm, cfg: TrainerConfig) -> bool:
    """Whether the loss of `algo` allows rows of prefix trees; if not, one line says why."""
    if cfg.prefix_sharing == "off":
        return False
    reason = _find_loss_reason(model, algo)
    explain_rows(reason, model, cfg)
    return reason is None


def explain_rows(reason: str | None, owner: object, cfg: TrainerConfig) -> None:
    """Log why samples have rows of their own, if there is a reason: once for a model, or for a
    class of backends."""
    said = _said.setdefault(owner, set())
    if reason is not None and reason not in said:
        said.add(reason)
        level = logging.WARNING if cfg.prefix_sharing == "tree" else logging.INFO
        logger.log(level, "each sample is computed as a whole, without sharing prefixes: %s", reason)


def _find_loss_reason(model: nn.Module, algo: RLAlgorithm) -> str | None:
    loss = adapted_loss(algo)
    if type(algo).compute_loss is not RLAlgorithm.compute_loss:
        return f"{algo.name} has its own compute_loss"
    if is_classifier(unwrap_transformer(model)):
        return None if loss.reads_scores_only else f"{loss_name(loss)} does not say that it reads_scores_only"
    if not (loss.reads_shared_only and loss.reads_actions_only):
        return f"{loss_name(loss)} reads logits, or those of tokens that are no actions"
    return None


def _prepare(model: nn.Module, cfg: TrainerConfig) -> str | None:
    """Make the model keep the branches of a tree apart: on a GPU by FlexAttention, elsewhere or if
    that fails by sdpa. Returns the reason if it cannot."""
    name, kind = get_attention(model), type(unwrap_transformer(model)).__name__
    if name not in ("sdpa", *OWN):
        return f"the attention of {kind} is {name}, not sdpa"
    if getattr(read_text_config(model), "attention_chunk_size", None):
        return f"{kind} attends in chunks"
    if _is_on_gpu(cfg):
        reason = _try_attention(model, PREFIX_FLEX, cfg)
        if reason is None:
            return None
        if model not in _said:
            logger.info("prefix trees are computed by sdpa, not by FlexAttention: %s", reason)
    return _try_attention(model, PACKED, cfg)


def _is_on_gpu(cfg: TrainerConfig) -> bool:
    return torch.device(cfg.model_device).type == "cuda"


def _try_attention(model: nn.Module, name: str, cfg: TrainerConfig) -> str | None:
    """Set the model's attention to `name`. Returns why it cannot be used, and then leaves it as it
    was."""
    before, kind = get_attention(model), type(unwrap_transformer(model)).__name__
    assert before is not None
    set_attention(model, name)
    try:
        difference, own = _measure_difference(model, cfg)
        reason = None if difference <= DIFFERENCE * own else f"{kind} has other logits for trees than for separate rows"
        if own == 0:  # as with a head of zeros: a model that mixes branches would pass
            reason = f"{kind} has the same logits whatever the tokens before, which tells nothing about trees"
        if reason is None and _hides_windows(model, cfg):  # wider than the samples above
            reason = f"{kind} attends in windows of which only its mask knows"
    except Exception as error:
        reason = f"{kind} does not accept trees ({type(error).__name__}: {error})"
    if reason is not None:
        set_attention(model, before)
    return reason


def _hides_windows(model: nn.Module, cfg: TrainerConfig) -> bool:
    with preserved_rng(), evaluation_mode(model), autocast(cfg):
        return hides_windows(model, cfg.model_device)


@torch.no_grad()
def _measure_difference(model: nn.Module, cfg: TrainerConfig) -> tuple[float, float]:
    """The largest difference of logits between the tree and separate rows, and how much they change
    with the first token."""
    lengths = np.array([len(ids) for ids in SAMPLES])
    offsets = np.concatenate([[0], lengths.cumsum()])
    table = _core.SampleTable.from_columns(np.concatenate(SAMPLES), np.ones(offsets[-1], dtype=np.uint8), offsets)
    order, shared, _, _ = table.plan_trees([0, 1, 2], int(offsets[-1]))
    trees = PrefixTrees.from_arrays(table.collate_trees(order, shared), lengths[order], shared, cfg.model_device)
    padded = {name: torch.from_numpy(column).to(cfg.model_device) for name, column in table.collate(range(4), 0).items()}
    row_of_trees = {"input_ids": trees.input_ids, PREFIX_TREES: trees}
    with preserved_rng():
        with evaluation_mode(model), autocast(cfg):
            row = _read_tokens(model, row_of_trees)[0].float()
            apart = _read_tokens(model, padded).float()
        if get_attention(model) == PREFIX_FLEX:  # an error for dropout, which evaluation does without
            with training_mode(model), autocast(cfg):
                forward_logits(model, row_of_trees)
    parts = row[trees.places].split(lengths[order].tolist())
    differences = [(part - apart[sample, : len(part)]).abs().max() for sample, part in zip(order, parts, strict=True)]
    return float(torch.stack(differences).max()), float((apart[0] - apart[3])[1:].abs().max())


def _read_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """What the model says of each token of `input_ids` [B, T]: logits [B, T, V], or of a classifier
    what its head reads [B, T, D]."""
    if not is_classifier(unwrap_transformer(model)):
        return forward_logits(model, batch)
    with captured_head(model) as seen:
        pooled = forward_logits(model, batch)
    states, scores = seen[-1]
    if states.shape[:-1] != batch["input_ids"].shape:
        raise ConfigError(f"its head reads {tuple(states.shape)}, not each token")
    if PREFIX_TREES not in batch and not reads_last_token(model, scores, pooled, batch["input_ids"]):
        raise ConfigError("it does not read its score at the last token")
    return states
