"""GMPO: the geometric mean of clipped token ratios."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ludic.errors import check_value
from ludic.training.loss.base import ActionLoss, check_clip
from ludic.training.loss.batch import Stats
from ludic.training.loss.context import SharedContext
from ludic.training.loss.logprobs import capped_exp
from ludic.training.loss.statistics import masked_means, out_of_range, policy_stats, population_std, reached_cap


@dataclass
class GMPOLoss(ActionLoss):
    """L = -mean_b R_b A_b, with log R_b = mean_t s_b g_bt, s_b = sign(A_b) and
    g_bt = min(s_b log r_bt, clip(s_b log r_bt, -low, high)); r_bt is the ratio of token t.

    Geometric-Mean Policy Optimization (arXiv:2507.20673): PPO's pessimistic clip, applied to the
    logarithm of each token ratio, with the range [e^-low, e^high] for r_bt. Without
    `length_normalize` the mean over t is a sum and R_b is a product. `ratio_clip` first caps r_bt
    from above. Nothing is detached.
    """

    clip_eps_low: float = 0.4
    clip_eps_high: float = 0.4
    length_normalize: bool = True
    ratio_clip: float | None = None

    zero_weight_is_zero_gradient = True
    weighs_answers = True

    def __post_init__(self) -> None:
        check_clip(self.clip_eps_low, self.clip_eps_high)
        check_value("ratio_clip", self.ratio_clip, "None turns it off", optional=True, above=0)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        sign = shared.weight.sign()[:, None]
        log_ratio = shared.log_ratio
        if self.ratio_clip is not None:
            log_ratio = log_ratio.clamp(max=math.log(self.ratio_clip))
        signed = sign * log_ratio
        bounded = sign * torch.minimum(signed, signed.clamp(-self.clip_eps_low, self.clip_eps_high))
        log_mean = (bounded * shared.token_mask).sum(dim=1)
        if self.length_normalize:
            log_mean = log_mean / shared.token_counts
        geometric = log_mean.exp()
        loss = -(geometric * shared.weight).mean()
        ratio = capped_exp(shared.log_ratio, self.ratio_clip)
        clipped = out_of_range(1.0 + shared.log_ratio, self.clip_eps_low, self.clip_eps_high)
        return loss, {
            "loss": loss.detach(),
            **policy_stats(shared, ratio),
            **masked_means(shared, clip_frac=clipped, ratio_clip_frac=reached_cap(ratio, self.ratio_clip)),
            "geom_mean_ratio_mean": geometric.detach().mean(),
            "geom_mean_ratio_std": population_std(geometric),
        }
