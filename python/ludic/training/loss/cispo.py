"""CISPO: clips the importance weight instead of the update."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ludic.training.loss.base import ActionLoss, check_clip, check_token_normalizer, row_mean
from ludic.training.loss.batch import Normalizer, Stats
from ludic.training.loss.context import SharedContext
from ludic.training.loss.statistics import masked_means, out_of_range, policy_stats


@dataclass
class CISPOLoss(ActionLoss):
    """L = -mean_b mean_t sg(clip(r_bt, 1 - low, 1 + high)) A_bt log pi_bt.

    MiniMax-M1 (arXiv:2506.13585, eq. 4 and 5). sg is stop-gradient: the clipped ratio is detached,
    so every token has a gradient, also outside the clip range. A_bt is the weight of the sample, or
    of the token (`token_weight`). By default there is no lower bound.
    Without `length_normalize` the mean over t is a sum; `normalizer="tokens"` takes one mean over
    all action tokens of the batch, while the paper takes it over a group.
    """

    clip_eps_low: float = 1e6
    clip_eps_high: float = 0.2
    length_normalize: bool = True
    normalizer: Normalizer = "samples"

    zero_weight_is_zero_gradient = True

    def __post_init__(self) -> None:
        check_clip(None, self.clip_eps_high)
        check_token_normalizer(self.normalizer, self.length_normalize)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        ratio = shared.ratio.detach()
        bounded = ratio.clamp(1.0 - self.clip_eps_low, 1.0 + self.clip_eps_high)
        objective = bounded * shared.token_weight * shared.token_logp
        loss = -row_mean(objective, shared, length_normalize=self.length_normalize, normalizer=self.normalizer)
        return loss, {
            "loss": loss.detach(),
            **policy_stats(shared, ratio),
            **masked_means(shared, clip_frac=out_of_range(ratio, self.clip_eps_low, self.clip_eps_high)),
        }
