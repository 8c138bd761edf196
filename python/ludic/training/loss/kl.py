"""KL penalties towards the old policy, which is the sampler's; with a correction the proximal one
(`loss.context`). The entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from ludic.errors import check_value
from ludic.training.loss.base import ActionLoss, check_token_normalizer, row_mean
from ludic.training.loss.batch import Normalizer, Stats
from ludic.training.loss.context import SharedContext
from ludic.training.loss.logprobs import weigh_values
from ludic.training.loss.statistics import Estimator, estimate_kl, masked_means, population_std


@dataclass
class TokenKLLoss(ActionLoss):
    """L = coeff * mean_b mean_t k(log pi_bt - log pi_old,bt), a KL penalty on tokens.

    The three estimators k are from Schulman, "Approximating KL divergence" (2020); k1 is the
    default. Without `length_normalize` the mean over t is a sum; `normalizer="tokens"` takes one
    mean over all action tokens. Set both as in the policy loss. The old log-probabilities are
    constants.
    """

    coeff: float = 0.01
    length_normalize: bool = True
    estimator: Estimator = "k1"
    normalizer: Normalizer = "samples"

    def __post_init__(self) -> None:
        check_value("estimator", self.estimator, choices=get_args(Estimator))
        check_token_normalizer(self.normalizer, self.length_normalize)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        mask, kl = shared.token_mask, estimate_kl(shared.log_ratio, self.estimator)
        loss = self.coeff * row_mean(kl, shared, length_normalize=self.length_normalize, normalizer=self.normalizer)
        sample_kl = weigh_values(kl, mask).sum(dim=1)
        if self.length_normalize:
            sample_kl = sample_kl / shared.token_counts
        return loss, {
            "loss": loss.detach(),
            "kl_mean": sample_kl.detach().mean(),
            "kl_std": population_std(sample_kl),
            **masked_means(shared, ratio_mean=shared.ratio),
            "ratio_std": population_std(shared.ratio, mask),
            "avg_action_tokens": mask.sum(dim=1).mean(),
        }


@dataclass
class KLLoss(ActionLoss):
    """L = coeff * mean_b k(l_b - l_old,b), a KL penalty on sequences; l_b is the log-probability of
    sequence b.

    k1 is the default, as in TokenKLLoss. With `length_normalize`, l_b and l_old,b are means over
    the tokens instead of sums. l_old,b is a constant.
    """

    coeff: float = 1.0
    old_logp_key: str = "old_logp_action"
    length_normalize: bool = False
    estimator: Estimator = "k1"

    def __post_init__(self) -> None:
        check_value("estimator", self.estimator, choices=get_args(Estimator))

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        logp_action = shared.logp_action(length_normalize=self.length_normalize)
        old_logp_action = shared.old_logp_action(self.old_logp_key, length_normalize=self.length_normalize)
        kl = estimate_kl(logp_action - old_logp_action, self.estimator)
        loss = self.coeff * kl.mean()
        return loss, {"loss": loss.detach(), "kl_mean": kl.detach().mean(), "kl_std": population_std(kl)}


@dataclass
class EntropyBonus(ActionLoss):
    """L = -coeff * mean_t H_t over all action tokens of the mini-batch; 0 if there are none.

    H_t is the entropy, in nats, of the policy's distribution of token t. `normalizer="samples"`
    takes the mean over samples of each sample's sum, or with `length_normalize` its mean. Set both
    as in the policy loss: the bonus then weighs the same at every length.
    """

    coeff: float = 0.01
    length_normalize: bool = False
    normalizer: Normalizer = "tokens"

    reads_entropy = True

    def __post_init__(self) -> None:
        check_token_normalizer(self.normalizer, self.length_normalize)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        entropy = row_mean(shared.entropy, shared, length_normalize=self.length_normalize, normalizer=self.normalizer)
        loss = -self.coeff * entropy
        stats: Stats = {"loss": loss.detach(), "entropy_mean": entropy.detach()}
        if self.normalizer == "tokens":
            stats["avg_action_tokens"] = shared.token_mask.sum(dim=1).mean()
        return loss, stats
