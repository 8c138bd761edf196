"""Checks whether a model can be trained on padding-free batches at linear cost; if not, batches are
padded."""

from __future__ import annotations

import logging
from dataclasses import replace
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ludic.models.evaluation_mode import evaluation_mode
from ludic.models.packed_attention import OWN, PACKED, get_attention, hides_windows, set_attention
from ludic.training.algorithm import forward_logits
from ludic.training.backend.precision import autocast
from ludic.training.config import TrainerConfig

logger = logging.getLogger(__name__)

LEAK = 0.05
"""How much the position of a sequence in the row may change its logits, as a fraction of the change
by its own first token. Rounding errors are smaller."""
_warned: WeakSet[nn.Module] = WeakSet()
"""Models for which the warning has been logged."""


def with_supported_packing(cfg: TrainerConfig, model: nn.Module) -> TrainerConfig:
    """Return `cfg`, with "optimal" instead of "padding_free" as `packing` if the model cannot be
    trained on padding-free batches, or only at a cost that is quadratic in the tokens of a
    micro-batch. One warning says why. A model with sdpa gets an attention function that processes
    sequences one by one (`packed_attention`)."""
    if cfg.packing != "padding_free":
        return cfg
    reason = _prepare(model, cfg)
    if reason is None:
        return cfg
    if model not in _warned:
        _warned.add(model)
        logger.warning('packing="padding_free" is replaced by "optimal", which pads: %s', reason)
    return replace(cfg, packing="optimal")


def _prepare(model: nn.Module, cfg: TrainerConfig) -> str | None:
    """Make the model separate the sequences of a row. Returns the reason if it cannot, else
    None."""
    name, kind = get_attention(model), type(model).__name__
    if name is None:
        return f"{kind} is not a transformers model, so it is unknown whether it separates the sequences of a row"
    if name not in ("sdpa", *OWN) and "flash" not in name:
        return (
            f'attn_implementation="{name}" would build a mask of [tokens, tokens]; load the model with "sdpa" or flash attention'
        )
    if name == "sdpa":
        set_attention(model, PACKED)
    try:
        leak, own = _measure_influences(model, cfg)
        with evaluation_mode(model), autocast(cfg):
            hidden = get_attention(model) in OWN and hides_windows(model, cfg.model_device)
    except Exception as error:
        set_attention(model, name)
        return f"{kind} does not accept concatenated sequences ({type(error).__name__}: {error})"
    if leak > LEAK * own:
        set_attention(model, name)
        return f"{kind} does not separate the sequences of a row: the logits of one depend on the sequence before it"
    if hidden:
        set_attention(model, name)
        return f"{kind} attends in windows of which only its mask knows"
    return None


@torch.no_grad()
def _measure_influences(model: nn.Module, cfg: TrainerConfig) -> tuple[float, float]:
    """Return how much the logits of a sequence change with its position in the row and with the
    sequence before it, and how much they change with its own first token.

    The rows have two sequences of 3 tokens; `logits(1, 2, 1, 1, 2, 1)` are those of [1 2 1] twice.
    """

    def logits(*ids: int) -> Tensor:
        row = torch.tensor([ids], device=cfg.model_device)
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=row.device)
        bounds = torch.tensor([0, 3, 6], dtype=torch.int32, device=row.device)
        return forward_logits(model, {"input_ids": row, "position_ids": positions, "cu_seqlens": bounds})[0].float()

    with evaluation_mode(model), autocast(cfg):
        twice, behind_another, other_first = logits(1, 2, 1, 1, 2, 1), logits(2, 1, 2, 1, 2, 1), logits(1, 2, 1, 2, 2, 1)
    leak = max((twice[3:] - twice[:3]).abs().max(), (behind_another[3:] - twice[3:]).abs().max())
    return float(leak), float((other_first[4:] - twice[4:]).abs().max())
