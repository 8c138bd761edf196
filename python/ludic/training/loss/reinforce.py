"""REINFORCE with an importance weight, with or without a baseline."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ludic.errors import check_value
from ludic.training.loss.base import ActionLoss
from ludic.training.loss.batch import Stats
from ludic.training.loss.context import SharedContext
from ludic.training.loss.logprobs import capped_exp, weigh_values
from ludic.training.loss.statistics import actor_policy_kl, population_std


@dataclass
class ReinforceLoss(ActionLoss):
    """L = -mean_b[ sg(r_b) A_b l_b ], where l_b = log pi(action_b), r_b = exp(l_b - l_old,b), and
    A_b is the weight of the sample; sg is stop-gradient. A batch with `token_weight` has
    sum_t A_bt log pi_bt in place of A_b l_b.

    Williams 1992, eq. 4. The importance weight r_b comes from the off-policy policy gradient
    (Degris et al. 2012, eq. 5); it corrects for the difference between the sampling and the
    training engine. With `length_normalize`, l_b and l_old,b are means over the tokens instead of
    sums. r_b is a product over tokens, so its variance grows with the length of the answer:
    `ratio_clip` caps it from above, as in truncated importance sampling (Ionides 2008). For long
    answers prefer CISPO.
    """

    length_normalize: bool = False
    old_logp_key: str = "old_logp_action"
    ratio_clip: float | None = None

    zero_weight_is_zero_gradient = True

    def __post_init__(self) -> None:
        check_value("ratio_clip", self.ratio_clip, "None turns it off", optional=True, above=0)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        return importance_weighted(self, shared, shared.token_weight)


@dataclass
class ReinforceBaselineLoss(ActionLoss):
    """ReinforceLoss with A_b = w_b - mean(w), divided by (std(w) + 1e-8) if `normalize`.

    Mean and population standard deviation are over the mini-batch (`BatchTotals`), so they do not
    depend on the split into micro-batches. A sample of weight 0 has the advantage -mean(w), so it
    is not skipped.
    """

    normalize: bool = False
    length_normalize: bool = False
    old_logp_key: str = "old_logp_action"
    ratio_clip: float | None = None

    weighs_answers = True

    def __post_init__(self) -> None:
        check_value("ratio_clip", self.ratio_clip, "None turns it off", optional=True, above=0)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        totals = shared.totals
        advantage = shared.weight - totals.weight_mean
        if self.normalize:
            advantage = advantage / (totals.weight_std + 1e-8)
        loss, stats = importance_weighted(self, shared, advantage[:, None])
        stats["baseline"] = shared.weight.new_tensor(totals.weight_mean)
        return loss, stats


def importance_weighted(
    settings: ReinforceLoss | ReinforceBaselineLoss, shared: SharedContext, advantage: Tensor
) -> tuple[Tensor, Stats]:
    """Return -mean_b[ sg(r_b) sum_t A_bt log pi_bt ] for advantages [B, 1] or [B, T - 1], and its
    statistics. `ratio_mean` is the mean of the capped ratios."""
    logp_action = shared.logp_action(length_normalize=settings.length_normalize)
    old_logp_action = shared.old_logp_action(settings.old_logp_key, length_normalize=settings.length_normalize)
    log_ratio = (logp_action - old_logp_action).detach()
    ratio = capped_exp(log_ratio, settings.ratio_clip)
    token_logp = weigh_values(shared.token_logp, shared.token_mask)
    if settings.length_normalize:
        token_logp = token_logp / shared.token_counts[:, None]
    loss = -(ratio[:, None] * advantage * token_logp).sum(dim=1).mean()
    mean_advantage = advantage[:, 0] if advantage.shape[1] == 1 else shared.mean_weight
    return loss, {
        "loss": loss.detach(),
        "adv_mean": mean_advantage.detach().mean(),
        "adv_std": population_std(mean_advantage),
        "logp_mean": logp_action.detach().mean(),
        "ratio_mean": ratio.mean(),
        "ratio_std": population_std(ratio),
        "kl_actor_policy": actor_policy_kl(log_ratio).mean(),
    }
