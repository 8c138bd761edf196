"""Corrections for samples drawn by another engine or an older policy: a weight on each token's
gradient.

Two engines give the same tokens different probabilities even at the same weights. With pi_s the
sampler's policy and pi_o the trainer's own at the beginning of the step, w_t = pi_o(y_t) /
pi_s(y_t) is the importance weight of a token. A correction replaces it by a bounded weight f(w_t),
and the ratios of the loss are taken against pi_o instead of pi_s:

    grad L = E_s[ f(w_t) grad l(pi / pi_o) ]

f is detached. It multiplies the gradient at the token's log-probability
(`SharedContext.token_logp`); the reported value of the loss is the uncorrected one. An entropy
bonus is not weighted, because its gradient does not go through the tokens' log-probabilities. A
weight depends on one token or one sample only, so it does not depend on how a batch is split.

Shapes: B samples, T tokens.
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
    `level="sequence"` gives all tokens of a sample the product of their w: unbiased up to the cap,
    with a variance that grows with the length.
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

    Masked importance sampling (Liu et al. 2025, "When Speed Kills Stability: Demystifying RL
    Collapse from the Training-Inference Mismatch"): drops what truncation would keep at the cap.
    `level="sequence"` drops whole samples.
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

    IcePop (Ling Team 2025, "Every Step Evolves", arXiv:2510.18855): drops the tokens on which the
    engines are far apart in either direction.
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


def correction_of(correction: Correction | str | None) -> Correction | None:
    """The correction itself, or the one of that name with its defaults. Raises ConfigError for an
    unknown name."""
    if not isinstance(correction, str):
        return correction
    if correction not in CORRECTIONS:
        raise ConfigError(
            f"correction ({correction!r}) must be one of {', '.join(CORRECTIONS)}, an object with `weights`, or None"
        )
    return CORRECTIONS[correction]()


def _at_level(log_ratio: Tensor, level: Level) -> Tensor:
    """[B, T - 1] log-ratios of tokens, or of the whole sample at each of its tokens."""
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
