"""Corrections for samples drawn by another engine or an older policy: a weight for the gradient of
each token.

Two engines give the same tokens different probabilities even at the same weights. Let pi_s be the
sampler's policy and pi_p the proximal policy: the trainer's at the start of the step
(`sampler_logp` and `proximal_logp` of `loss.context`). The importance weight of a token is w_t =
pi_p(y_t) / pi_s(y_t). A correction replaces it by a bounded weight f(w_t), and the ratios of the
loss use pi_p instead of pi_s as the old policy:

    grad L = E_s[ f(w_t) grad l(pi / pi_p) ]

f is detached. It multiplies the gradient of the token's log-probability
(`SharedContext.token_logp`); the reported loss is the uncorrected one. An entropy bonus is not
weighted, because its gradient does not pass through the log-probabilities of tokens. A weight
depends on one token or one sample only, so it does not depend on the split into micro-batches.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ludic.errors import check_value
from ludic.training.loss.batch import Correction
from ludic.training.loss.logprobs import capped_exp

Level = Literal["token", "sequence"]
LEVELS = ("token", "sequence")


@dataclass(frozen=True)
class TruncatedImportanceSampling:
    """f(w) = min(w, cap).

    Truncated importance sampling (Ionides 2008) between the sampling and the training engine (Yao
    et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"). With
    `level="sequence"`, w is the product over all tokens of the sample: unbiased below the cap, but
    with a variance that grows with the length.
    """

    cap: float = 2.0
    level: Level = "token"

    def __post_init__(self) -> None:
        check_value("level", self.level, choices=LEVELS)
        check_value("cap", self.cap, above=0, below=math.inf)

    def weights(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return capped_exp(_at_level(log_ratio, self.level), self.cap)


@dataclass(frozen=True)
class MaskedImportanceSampling:
    """f(w) = w if w <= cap, else 0.

    Masked importance sampling (Liu et al. 2025, "When Speed Kills Stability: Demystifying RL
    Collapse from the Training-Inference Mismatch"): drops the tokens that truncation would keep
    with weight `cap`. `level="sequence"` drops whole samples.
    """

    cap: float = 2.0
    level: Level = "token"

    def __post_init__(self) -> None:
        check_value("level", self.level, choices=LEVELS)
        check_value("cap", self.cap, above=0, below=math.inf)

    def weights(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        at_level = _at_level(log_ratio, self.level)
        return capped_exp(at_level, self.cap).masked_fill(at_level > math.log(self.cap), 0.0)


@dataclass(frozen=True)
class IcePop:
    """f(w) = w if low <= w <= high, else 0, token by token.

    IcePop (Ling Team 2025, "Every Step Evolves", arXiv:2510.18855): drops the tokens with a large
    difference between the engines, in either direction.
    """

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        check_value("low", self.low, above=0)
        check_value("high", self.high, "weights between low and high are kept", above=self.low, below=math.inf)

    def weights(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        outside = (log_ratio < math.log(self.low)) | (log_ratio > math.log(self.high))
        return capped_exp(log_ratio, self.high).masked_fill(outside, 0.0)


CORRECTIONS: dict[str, type[TruncatedImportanceSampling | MaskedImportanceSampling | IcePop]] = {
    "truncated": TruncatedImportanceSampling,
    "masked": MaskedImportanceSampling,
    "icepop": IcePop,
}
"""Name in recipes -> class."""


def resolve_correction(correction: Correction | str | None) -> Correction | None:
    """Return the correction; a name gives the correction of that name with its defaults. Raises
    ConfigError for an unknown name."""
    if not isinstance(correction, str):
        return correction
    check_value("correction", correction, "or pass an object with `weights`", choices=CORRECTIONS)
    return CORRECTIONS[correction]()


def _at_level(log_ratio: Tensor, level: Level) -> Tensor:
    """[B, T - 1] log-ratio of each token, or, at every token, the sum over its sample. Example:
    [1, 2, 0] gives [3, 3, 3] for "sequence"."""
    return log_ratio if level == "token" else log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
