"""PPO's clipped surrogate objective with a ratio per sequence (GSPO) or per token (GRPO)."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from warnings import warn

import torch
from torch import Tensor

from ludic.errors import check_value
from ludic.training.loss.base import ActionLoss, check_clip, check_token_normalizer, row_mean
from ludic.training.loss.batch import Normalizer, Stats
from ludic.training.loss.context import SharedContext
from ludic.training.loss.logprobs import capped_exp
from ludic.training.loss.statistics import actor_policy_kl, masked_means, out_of_range, policy_stats, population_std, reached_cap


@dataclass
class ClippedSurrogateLoss(ActionLoss):
    """L = -mean_b min(r_b A_b, clip(r_b, 1 - low, 1 + high) A_b); r_b is the ratio of sequence b.

    GSPO (arXiv:2507.18071, eq. 5 to 7): with `length_normalize`, r_b is the geometric mean of the
    token ratios. `ratio_clip` first caps r_b from above. Nothing is detached; a sequence has no
    gradient if its ratio is beyond the clip range in the direction of its advantage. `clip_eps` is
    deprecated: it sets both sides of the range and warns.
    """

    clip_eps_low: float = 3e-4
    clip_eps_high: float = 4e-4
    old_logp_key: str = "old_logp_action"
    length_normalize: bool = False
    ratio_clip: float | None = None
    clip_eps: InitVar[float | None] = None

    zero_weight_is_zero_gradient = True
    weighs_answers = True

    def __post_init__(self, clip_eps: float | None) -> None:
        if clip_eps is not None:
            warn("clip_eps is deprecated; use clip_eps_low and clip_eps_high", DeprecationWarning, stacklevel=3)
            self.clip_eps_low = self.clip_eps_high = clip_eps
        check_clip(self.clip_eps_low, self.clip_eps_high)
        check_value("ratio_clip", self.ratio_clip, "None turns it off", optional=True, above=0)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        advantage = shared.weight
        logp_action = shared.logp_action(length_normalize=self.length_normalize)
        log_ratio = logp_action - shared.old_logp_action(self.old_logp_key, length_normalize=self.length_normalize)
        ratio = capped_exp(log_ratio, self.ratio_clip)
        loss = -clipped_objective(ratio, advantage, self.clip_eps_low, self.clip_eps_high).mean()
        return loss, {
            "loss": loss.detach(),
            "ratio_mean": ratio.detach().mean(),
            "ratio_std": population_std(ratio),
            "clip_frac": out_of_range(ratio, self.clip_eps_low, self.clip_eps_high).mean(),
            "ratio_clip_frac": reached_cap(ratio, self.ratio_clip).mean(),
            "kl_actor_policy": actor_policy_kl(log_ratio).mean(),
            "adv_mean": advantage.mean(),
            "adv_std": population_std(advantage),
            "logp_mean": logp_action.detach().mean(),
        }


@dataclass
class TokenClippedSurrogateLoss(ActionLoss):
    """L = -mean_b sum_t min(r_bt A_b, clip(r_bt, 1 - low, 1 + high) A_b); r_bt is the ratio of
    token t.

    GRPO (DeepSeekMath, arXiv:2402.03300, eq. 3, without its KL term) with the asymmetric range of
    DAPO (arXiv:2503.14476, eq. 10). With `length_normalize` the sum over tokens is divided by their
    number; `normalizer="tokens"` takes one mean over all action tokens of the batch (DAPO, eq. 8).
    `ratio_clip` first caps r_bt from above; one of at least 1 + high is the dual clip of Ye et al.
    2020 (arXiv:1912.09729, eq. 5). A batch with `token_weight` has an advantage for each token.
    Nothing is detached.
    """

    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.27
    length_normalize: bool = False
    ratio_clip: float | None = None
    normalizer: Normalizer = "samples"

    zero_weight_is_zero_gradient = True

    def __post_init__(self) -> None:
        check_clip(self.clip_eps_low, self.clip_eps_high)
        check_value("ratio_clip", self.ratio_clip, "None turns it off", optional=True, above=0)
        check_token_normalizer(self.normalizer, self.length_normalize)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        ratio = shared.ratio if self.ratio_clip is None else capped_exp(shared.log_ratio, self.ratio_clip)
        objective = clipped_objective(ratio, shared.token_weight, self.clip_eps_low, self.clip_eps_high)
        loss = -row_mean(objective, shared, length_normalize=self.length_normalize, normalizer=self.normalizer)
        clipped = out_of_range(ratio, self.clip_eps_low, self.clip_eps_high)
        return loss, {
            "loss": loss.detach(),
            **policy_stats(shared, ratio),
            **masked_means(shared, clip_frac=clipped, ratio_clip_frac=reached_cap(ratio, self.ratio_clip)),
        }


def clipped_objective(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A): Schulman et al. 2017 (arXiv:1707.06347), eq. 7."""
    return torch.minimum(ratio * advantage, ratio.clamp(1.0 - low, 1.0 + high) * advantage)
