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
depends on one token or one sample only, or with `M2PO` on all samples of the training step,
so it does not depend on the split into micro-batches and ranks.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from ludic.errors import check_value
from ludic.training.loss.batch import LOG_RATIO_BOUND, Correction, read_column
from ludic.training.loss.logprobs import capped_exp

if TYPE_CHECKING:
    from ludic.training.loss.context import SharedContext

Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class _Capped:
    cap: float = 2.0
    level: Level = "token"

    def __post_init__(self) -> None:
        check_value("level", self.level, choices=get_args(Level))
        check_value("cap", self.cap, above=0, below=math.inf)


@dataclass(frozen=True)
class TruncatedImportanceSampling(_Capped):
    """f(w) = min(w, cap).

    Truncated importance sampling (Ionides 2008) between the sampling and the training engine (Yao
    et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"). With
    `level="sequence"`, w is the product over all tokens of the sample: unbiased below the cap, but
    with a variance that grows with the length.
    """

    def weights(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return capped_exp(_at_level(log_ratio, self.level), self.cap)


@dataclass(frozen=True)
class MaskedImportanceSampling(_Capped):
    """f(w) = w if w <= cap, else 0.

    Masked importance sampling (Liu et al. 2025, "When Speed Kills Stability: Demystifying RL
    Collapse from the Training-Inference Mismatch"): drops the tokens that truncation would keep
    with weight `cap`. `level="sequence"` drops whole samples.
    """

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


@dataclass(frozen=True)
class _Dropping:
    """f(w) = 0 for the tokens that `drops` names, else w, at most e^20."""

    threshold: float
    reads_shared = True

    def __post_init__(self) -> None:
        check_value("threshold", self.threshold, above=0, below=math.inf)

    def drops(self, log_ratio: Tensor, shared: SharedContext) -> Tensor:
        raise NotImplementedError

    def weights(self, log_ratio: Tensor, mask: Tensor, *, shared: SharedContext) -> Tensor:
        return log_ratio.clamp(max=20.0).exp().masked_fill(self.drops(log_ratio, shared), 0.0)


@dataclass(frozen=True)
class KPop(_Dropping):
    """f(w) = w if D(p, q) <= threshold and D(q, p) <= threshold, else 0, token by token.

    p and q are the token's probabilities under pi_p and pi_s, D(p, q) = p log(p / q) + (1 - p)
    log((1 - p) / (1 - q)). KPop (Guo et al. 2026, ringtech.notion.site/kpop): unlike bounds on w it
    leaves room to rare tokens and holds likely ones. 1 - p is taken as at least 1e-6.
    """

    threshold: float = 0.1
    """Nats."""

    def drops(self, log_ratio: Tensor, shared: SharedContext) -> Tensor:
        log_q, log_p = shared.sampler_logp, shared.sampler_logp + log_ratio
        return torch.maximum(_binary_kl(log_p, log_q), _binary_kl(log_q, log_p)) > self.threshold


@dataclass(frozen=True)
class DPPO(_Dropping):
    """f(w) = 0 if D > threshold and the gradient moves the token further away from the sampler
    (A > 0 and w > 1, or A < 0 and w < 1), else w, token by token.

    Divergence PPO (Qi et al. 2026, arXiv:2602.04879), binary: with the names of `KPop`, D is
    |p - q| ("tv") or D(q, p) ("kl"). A is the token's weight, which must be an advantage; in
    `make_reinforce_baseline` it is none. Departures: the paper's p is of the current policy, which
    is pi_p in the first optimizer step of a batch; and it has no other clip, but the loss may.
    """

    threshold: float = 0.15
    """Other libraries take 0.1 to 0.2 for "tv", and 0.05 nats for "kl"."""
    divergence: Literal["tv", "kl"] = "tv"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value("divergence", self.divergence, choices=("tv", "kl"))

    def drops(self, log_ratio: Tensor, shared: SharedContext) -> Tensor:
        log_q, log_p = shared.sampler_logp, shared.sampler_logp + log_ratio
        far = (log_p.exp() - log_q.exp()).abs() if self.divergence == "tv" else _binary_kl(log_q, log_p)
        return (far > self.threshold) & (shared.token_weight * log_ratio > 0)


@dataclass(frozen=True)
class M2PO(_Dropping):
    """f(w) = w for the tokens with the smallest |log w| whose mean of (log w)^2 is at most
    `threshold`, else 0.

    Second-moment trust policy optimization (Zheng et al. 2025, arXiv:2510.01161). The mean is over
    all action tokens of a training step, of all its mini-batches and ranks, which costs one more
    forward pass. Departure: the paper's w is of the current policy; AReaL too takes pi_p.
    """

    threshold: float = 0.04
    """Nats squared."""

    def bound(self, log_ratio: Tensor) -> float:
        """The smallest |log w| of the [N] tokens of a step that is dropped, as all equal ones are;
        inf if none is. Example: log w 0.1, -0.2, 0.5 have the mean squares 0.01, 0.025 and 0.1 of
        the smallest 1, 2 and 3: the bound is 0.5."""
        sizes = log_ratio.abs().sort().values
        means = sizes.double().square().cumsum(0) / torch.arange(1, len(sizes) + 1, device=sizes.device)
        dropped = sizes[int((means <= self.threshold).sum()) :]
        return float(dropped[0]) if len(dropped) else math.inf

    def drops(self, log_ratio: Tensor, shared: SharedContext) -> Tensor:
        bound = read_column(shared.batch, LOG_RATIO_BOUND, "train with Trainer, which computes it over the whole step")
        return log_ratio.abs() >= bound[:, None]


CORRECTIONS: dict[str, Callable[[], Correction]] = {
    "truncated": TruncatedImportanceSampling,
    "masked": MaskedImportanceSampling,
    "icepop": IcePop,
    "kpop": KPop,
    "m2po": M2PO,
    "dppo": DPPO,
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


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL between two distributions over "this token" and "another one", in nats."""
    p, rest_p, rest_q = log_p.exp(), *((-torch.expm1(each)).clamp(min=1e-6) for each in (log_p, log_q))
    return p * (log_p - log_q) + rest_p * (rest_p.log() - rest_q.log())
