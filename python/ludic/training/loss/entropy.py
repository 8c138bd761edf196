"""The entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ludic.training.loss.base import Loss, row_mean
from ludic.training.loss.batch import Stats
from ludic.training.loss.context import SharedContext


@dataclass
class EntropyBonus(Loss):
    """L = -coeff * mean_t H_t over all action tokens of the mini-batch; 0 if there are none.

    H_t is the entropy, in nats, of the policy's distribution of token t.
    """

    coeff: float = 0.01

    normalizer = "tokens"
    reads_shared_only = True
    reads_actions_only = True
    reads_entropy = True

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        entropy = row_mean(shared.entropy, shared, length_normalize=False, normalizer="tokens")
        loss = -self.coeff * entropy
        return loss, {"loss": loss.detach(), "entropy_mean": entropy.detach()}
