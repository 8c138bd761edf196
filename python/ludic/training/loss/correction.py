"""Corrections for samples that another engine, or an older policy, drew: a weight on each token's
gradient.

Two engines give the same tokens different probabilities even at the same weights. With pi_s the
sampler's policy and pi_o the trainer's own at the beginning of the step, w_t = pi_o(y_t) /
pi_s(y_t) is the importance weight that turns the sampler's tokens into the trainer's. A correction
makes a bounded weight f(w_t) of it, and the ratios of the loss are then taken against pi_o instead
of pi_s:

    grad L = E_s[ f(w_t) grad l(pi / pi_o) ]

f is detached. It multiplies the gradient at the token's log-probability
(`SharedContext.token_logp`); the value that a loss reports is that without the correction. An
entropy bonus, whose gradient does not go through the tokens' log-probabilities, is not weighed.
Weights are those of one token or of one sample, so that they do not depend on how a batch is split.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ludic.errors import ConfigError
from ludic.training.loss.batch import Correction
from ludic.training.loss.functional import capped_exp

Level = Literal["token", "sequence"]
LEVELS = ("token", "sequence")


@dataclass(frozen=True)
class TruncatedImportanceSampling:
    """f(w) = min(w, cap).

    Truncated importance sampling (Ionides 2008) between the engines of sampling and training (Yao
    et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training").
    `level="sequence"` takes the product of w over a sample's tokens and gives it to all of them,
    which is unbiased up to the cap, and of a spread that grows with the length.
    """

    cap: float = 2.0
    level: Level = "token"

    def __post_init__(self) -> None:
        _check(self.level, cap=self.cap)

    def weights(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return capped_exp(_at_level(log_ratio, self.level), self.cap)


@dataclass(frozen=True)
class MaskedImportanceSampling:
    """f(w) = w if w <= cap, else 0.

    What truncation would keep at the cap is left out: masked importance sampling (Liu et al. 2025,
    "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch").
    `level="sequence"` leaves out whole samples.
    """

    cap: float = 2.0
    level: Level = "token"

    def __post_init__(self) -> None:
        _check(self.level, cap=self.cap)

    def weights(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        at_level = _at_level(log_ratio, self.level)
        return capped_exp(at_level, self.cap).masked_fill(at_level > math.log(self.cap), 0.0)


@dataclass(frozen=True)
class IcePop:
    """f(w) = w if low <= w <= high, else 0, token by token.

    IcePop (Ling Team 2025, "Every Step Evolves", arXiv:2510.18855): tokens on which the engines are
    far apart, on either side, are left out.
    """

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        _check("token", low=self.low, high=self.high)
        if self.low >= self.high:
            raise ConfigError(f"low ({self.low}) must be below high ({self.high}): weights between them are kept")

    def weights(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        outside = (log_ratio < math.log(self.low)) | (log_ratio > math.log(self.high))
        return capped_exp(log_ratio, self.high).masked_fill(outside, 0.0)


CORRECTIONS: dict[str, type[TruncatedImportanceSampling | MaskedImportanceSampling | IcePop]] = {
    "truncated": TruncatedImportanceSampling,
    "masked": MaskedImportanceSampling,
    "icepop": IcePop,
}
"""By the names that recipes use."""


def correction_of(given: Correction | str | None) -> Correction | None:
    """A correction, or the one of that name with its defaults."""
    if not isinstance(given, str):
        return given
    if given not in CORRECTIONS:
        raise ConfigError(f"correction ({given!r}) must be one of {', '.join(CORRECTIONS)}, an object with `weights`, or None")
    return CORRECTIONS[given]()


def _at_level(log_ratio: Tensor, level: Level) -> Tensor:
    """[B, T - 1] of each token, or of its whole row."""
    return log_ratio if level == "token" else log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)


def _check(level: str, **bounds: float) -> None:
    if level not in LEVELS:
        raise ConfigError(f"level ({level!r}) must be 'token' or 'sequence'")
    for name, value in bounds.items():
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name} ({value}) must be a finite number > 0: it bounds a ratio of probabilities")


__all__ = [
    "CORRECTIONS",
    "Correction",
    "IcePop",
    "MaskedImportanceSampling",
    "TruncatedImportanceSampling",
    "correction_of",
]
