"""Decides whether a model computes rows of prefix trees (`batching.tree_batches`); if not, samples
have rows of their own.

The choice depends on the settings, the model and, in passes with gradient, the loss, so it is the
same on all ranks and after a resume.
"""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ludic.models.heads import is_classifier
from ludic.models.packed_attention import OWN, PACKED, get_attention, unwrap_transformer
from ludic.models.prefix_trees import PREFIX_FLEX
from ludic.training.algorithm import RLAlgorithm
from ludic.training.backend.protocol import with_defaults
from ludic.training.config import TrainerConfig
from ludic.training.loss.base import adapted_loss, loss_name
from ludic.training.preflight.layouts import find_fault
from ludic.training.ranks.collectives import max_over_ranks

logger = logging.getLogger(__name__)

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


def shares_prefixes(backend: object, cfg: TrainerConfig) -> bool:
    """Whether the mini-batches of a trainer may be rows of prefix trees; one line says why not."""
    shared = with_defaults(backend).shares_prefixes
    if shared is None and cfg.prefix_sharing != "off":
        explain_rows(f"{type(backend).__name__} does not compute them", type(backend), cfg)
    return bool(shared)


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
        return f"{loss_name(loss)} reads logits, or log-probabilities of tokens that are no actions"
    return None


def _prepare(model: nn.Module, cfg: TrainerConfig) -> str | None:
    """Make the model keep the branches of a tree apart: on a GPU by FlexAttention, elsewhere or if
    that fails by sdpa. Returns the reason if it cannot."""
    name, kind = get_attention(model), type(unwrap_transformer(model)).__name__
    if name not in ("sdpa", *OWN):
        return f"the attention of {kind} is {name}, not sdpa"
    if _is_on_gpu(cfg):
        reason = find_fault(model, cfg, "trees", attention=PREFIX_FLEX)
        if reason is None:
            return None
        if model not in _said:
            logger.info("prefix trees are computed by sdpa, not by FlexAttention: %s", reason)
    return find_fault(model, cfg, "trees", attention=PACKED)


def _is_on_gpu(cfg: TrainerConfig) -> bool:
    return torch.device(cfg.model_device).type == "cuda"
