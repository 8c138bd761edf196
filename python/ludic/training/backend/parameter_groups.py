"""Groups of parameters, each with one learning rate and one weight decay."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from ludic.errors import ConfigError
from ludic.models.heads import find_head_parts, is_in_module
from ludic.models.names import HEAD_NAMES


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    backbone_lr_mult: float | None = None,
    head_only_weight_decay: bool = False,
    decay_biases_and_norms: bool = True,
) -> list[dict[str, Any]]:
    """The trainable parameters in groups, as an optimizer takes them. Groups of the head
    (`find_head_parts`) come first.

    `backbone_lr_mult`: all parameters but the head have the rate `lr * backbone_lr_mult`; None: all
    have `lr`. `head_only_weight_decay`: only the head has weight decay.
    `decay_biases_and_norms=False`: parameters of fewer than two dimensions (biases and weights of
    norms) have no weight decay.

    Parameters with the same settings share a group. With the defaults there is one group.
    """
    heads = _require_head(model) if backbone_lr_mult is not None or head_only_weight_decay else []
    if backbone_lr_mult is not None and not (math.isfinite(backbone_lr_mult) and backbone_lr_mult >= 0):
        raise ConfigError(f"backbone_lr_mult ({backbone_lr_mult}) must be a finite number >= 0; 1.0 is the head's rate")
    groups: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        backbone = bool(heads) and not any(is_in_module(name, head) for head in heads)
        rate = lr * backbone_lr_mult if backbone and backbone_lr_mult is not None else lr
        has_no_decay = (backbone and head_only_weight_decay) or (parameter.ndim < 2 and not decay_biases_and_norms)
        groups.setdefault((backbone, rate, 0.0 if has_no_decay else weight_decay), []).append(parameter)
    if not groups:
        raise ConfigError("the model has no parameter with requires_grad=True; there is nothing to train")
    in_order = sorted(groups.items(), key=lambda group: group[0][0])  # head first: the first group's rate is logged
    return [{"params": parameters, "lr": rate, "weight_decay": decay} for (_, rate, decay), parameters in in_order]


def _require_head(model: nn.Module) -> list[str]:
    heads = find_head_parts(model)
    if not heads:
        raise ConfigError(
            f"{type(model).__name__} has no head ({', '.join(HEAD_NAMES)}) to train at a rate or decay of its own; leave "
            "use_differential_lr and head_only_weight_decay off"
        )
    return heads
