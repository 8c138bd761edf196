"""The entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ludic.training.loss.base import Loss, check_token_normalizer, row_mean
from ludic.training.loss.batch import Normalizer, Stats
from ludic.training.loss.context import SharedContext


@dataclass
class EntropyBonus(Loss):
    """L = -coeff * mean_t H_t over all action tokens of the mini-batch; 0 if there are none.

    H_t is the entropy, in nats, of the policy's distribution of token t. `normalizer="samples"`
    takes the mean over samples of each sample's sum, or with `length_normalize` its mean. Set both
    as in the policy loss: the bonus then weighs the same at every length.
    """

    coeff: float = 0.01
    length_normalize: bool = False
    normalizer: Normalizer = "tokens"

    reads_shared_only = True
    reads_actions_only = True
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
