"""KL towards a reference that does not change during training, as a penalty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from ludic.errors import check_value
from ludic.training.coefficients import Coefficient
from ludic.training.loss.base import ActionLoss, check_token_normalizer, row_mean
from ludic.training.loss.batch import Normalizer, Stats
from ludic.training.loss.context import SharedContext
from ludic.training.loss.logprobs import mask_values, weigh_values
from ludic.training.loss.statistics import Estimator, estimate_kl

KLLevel = Literal["token", "sequence"]


@dataclass
class ReferenceKLLoss(ActionLoss):
    """L = coeff * mean of k(log pi - log pi_ref) over tokens, a KL penalty towards the reference.

    The estimators k are defined in `TokenKLLoss`. As a loss on samples of the policy, k3, the
    default, has the expected gradient of KL(pi_ref || pi), k2 of KL(pi || pi_ref), k1 none.
    `level="sequence"`, the form of liv-daliberti/maxent-grpo (2026): every token has k of its
    sample's mean log-ratio. It is never above the token's k3, and blind to log-ratios that cancel
    within an answer. The mean is over the action tokens of the mini-batch; with
    `normalizer="samples"` over samples, of each sample's sum, or with `length_normalize` its mean.
    Set both as in the policy loss, as presets do: the penalty then weighs the same at every length.
    `coeff` may be a `Coefficient`, which is read each time. The reference is a constant.
    """

    coeff: float | Coefficient = 0.01
    estimator: Estimator = "k3"
    level: KLLevel = "token"
    length_normalize: bool = False
    normalizer: Normalizer = "tokens"

    reads_reference = True

    def __post_init__(self) -> None:
        check_value("estimator", self.estimator, choices=get_args(Estimator))
        check_value("level", self.level, choices=get_args(KLLevel))
        check_token_normalizer(self.normalizer, self.length_normalize)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        mask = shared.token_mask
        log_ratio = mask_values(shared.token_logp - shared.reference_logp, mask)
        if self.level == "token":
            kl = estimate_kl(log_ratio, self.estimator)
        else:
            mean = weigh_values(log_ratio, mask).sum(dim=1, keepdim=True) / shared.token_counts[:, None]
            kl = estimate_kl(mean, self.estimator).expand_as(mask)
        loss = float(self.coeff) * row_mean(kl, shared, length_normalize=self.length_normalize, normalizer=self.normalizer)
        return loss, {"loss": loss.detach()}
