"""Whether a model can be trained on padding-free batches, and cheaply: else they are padded."""

from __future__ import annotations

import logging
from dataclasses import replace
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ludic.models.evaluation_mode import evaluation_mode
from ludic.models.packed_attention import PACKED, get_attention, set_attention
from ludic.training.algorithm import forward_logits
from ludic.training.backend.precision import autocast
from ludic.training.config import TrainerConfig

logger = logging.getLogger(__name__)

LEAK = 0.05
"""How much a sequence's place may change its logits, as a share of what its own first token
changes. Rounding stays below it."""
_warned: WeakSet[nn.Module] = WeakSet()
"""Models that were warned of."""


def with_supported_packing(cfg: TrainerConfig, model: nn.Module) -> TrainerConfig:
    """`cfg`, whose `packing` is "optimal" instead of "padding_free" where the model could not be
    trained on that, or only at a cost quadratic in the tokens of a micro-batch; one warning says
    why. A model with sdpa is given an attention that takes the sequences one by one
    (`packed_attention`)."""
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
    """Make the model keep the sequences of a row apart. Returns why it cannot; None if it can."""
    name, kind = get_attention(model), type(model).__name__
    if name is None:
        return f"{kind} is not a model of transformers, and nothing says that it keeps the sequences of a row apart"
    if name not in ("sdpa", PACKED) and "flash" not in name:
        return (
            f'attn_implementation="{name}" would build a mask of [tokens, tokens]; load the model with "sdpa" or flash attention'
        )
    if name == "sdpa":
        set_attention(model, PACKED)
    try:
        moved, own = _influences(model, cfg)
    except Exception as error:
        set_attention(model, name)
        return f"{kind} does not take sequences one behind another ({type(error).__name__}: {error})"
    if moved > LEAK * own:
        set_attention(model, name)
        return f"{kind} does not keep the sequences of a row apart: the logits of one depend on what stands before it"
    return None


@torch.no_grad()
def _influences(model: nn.Module, cfg: TrainerConfig) -> tuple[float, float]:
    """How much the logits of a sequence change with its place in the row and with what stands
    before it, and how much with its own first token."""

    def logits(*ids: int) -> Tensor:
        row = torch.tensor([ids], device=cfg.model_device)
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=row.device)
        bounds = torch.tensor([0, 3, 6], dtype=torch.int32, device=row.device)
        return forward_logits(model, {"input_ids": row, "position_ids": positions, "cu_seqlens": bounds})[0].float()

    with evaluation_mode(model), autocast(cfg):
        twice, behind_another, other_first = logits(1, 2, 1, 1, 2, 1), logits(2, 1, 2, 1, 2, 1), logits(1, 2, 1, 2, 2, 1)
    moved = max((twice[3:] - twice[:3]).abs().max(), (behind_another[3:] - twice[3:]).abs().max())
    return float(moved), float((other_first[4:] - twice[4:]).abs().max())
