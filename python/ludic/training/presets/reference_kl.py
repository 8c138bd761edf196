"""The KL penalty towards a reference that presets add to their loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ludic.errors import ConfigError
from ludic.training.coefficients import Coefficient
from ludic.training.loss import CompositeLoss, Loss, LossTerm, ReferenceKLLoss
from ludic.training.loss.kl import Estimator
from ludic.training.loss.reference import KLLevel


def add_reference_kl(
    loss: Loss, coeff: float, estimator: Estimator = "k3", level: KLLevel = "token"
) -> tuple[Loss, Mapping[str, Coefficient]]:
    """Return the loss and the coefficients of the algorithm: with `coeff` above 0, `loss` with a
    `ReferenceKLLoss`, whose coefficient is `beta`; with 0, `loss` itself and none. The terms of a
    composite loss stay terms. The penalty has the mean of the first term, the policy loss."""
    if not (coeff >= 0 and math.isfinite(coeff)):
        raise ConfigError(f"reference_kl ({coeff}) must be a finite number >= 0; 0 is no penalty")
    if coeff == 0:
        return loss, {}
    beta = Coefficient(coeff)
    terms = loss.terms if isinstance(loss, CompositeLoss) else [LossTerm("policy", loss)]
    penalty = ReferenceKLLoss(beta, estimator, level, **token_mean(terms[0].loss))
    return CompositeLoss([*terms, LossTerm("reference_kl", penalty)]), {"beta": beta}


def token_mean(policy: Loss) -> dict[str, Any]:
    """The arguments that give a penalty per token the mean of the policy loss."""
    return {name: getattr(policy, name) for name in ("length_normalize", "normalizer")}
