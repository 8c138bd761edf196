"""MaxEnt-GRPO as a likelihood: weighted log-probabilities of whole answers, and its clip term.

Both read the columns of `maxent.ListwiseCredit`. Shapes: B samples, T tokens. A candidate i is a
rollout with n_i action tokens; with several turns it is several samples b, of n_b tokens each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from ludic.errors import check_value
from ludic.training.loss.base import ActionLoss, check_clip
from ludic.training.loss.batch import Stats
from ludic.training.loss.clipped import clipped_objective
from ludic.training.loss.context import SharedContext
from ludic.training.loss.logprobs import weigh_values
from ludic.training.loss.statistics import out_of_range, population_std

RatioLevel = Literal["token", "sequence_mean", "sequence_sum"]
MAX_LOG_RATIO = 60.0
"""Log-ratios are clamped to [-60, 60], as in the document: exp of a sum over a long answer
overflows."""


@dataclass
class ListwiseLoss(ActionLoss):
    """L = -mean over groups of sum_i a_i l_i, where l_i is the mean log-probability of candidate
    i's tokens, and a_i its weight in the group: w_i - 1/K, or w_i with `baseline="none"`.

    Source: liv-daliberti/maxent-grpo, `docs/guides/training.rst` (2026), L_pol. As a mean over
    samples: L = -mean_b A_b s_b m_b, where A_b = (C/G) a_i is the sample's weight, s_b its
    `row_share`, and m_b the mean log-probability of its tokens. Without `length_normalize`, l_i is
    a sum. The weights are constants.
    """

    length_normalize: bool = True

    zero_weight_is_zero_gradient = True
    weighs_answers = True

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        advantage, mean_logp = shared.weight, shared.logp_action(length_normalize=True)
        logp = mean_logp * shared.sample_column("row_share")
        if not self.length_normalize:  # (n_b / n_i) (N / C) n_i m_b = (N / C) times the sum over the row
            logp = logp * shared.sample_column("candidate_tokens")
        loss = -(advantage * logp).mean()
        return loss, {
            "loss": loss.detach(),
            "adv_mean": advantage.mean(),
            "adv_std": population_std(advantage),
            "logp_mean": shared.logp_action().detach().mean(),
            "avg_action_tokens": shared.token_mask.sum(dim=1).mean(),
        }


@dataclass
class ListwiseClipLoss(ActionLoss):
    """L = coeff * mean over groups of sum_i -min(r_i A_i, clip(r_i, 1 - low, 1 + high) A_i), with
    A_i = w_i - baseline, which is 1/K if None.

    Source: liv-daliberti/maxent-grpo, the clip term, with two departures: min for both signs of A,
    as in PPO (arXiv:1707.06347, eq. 7), and the ratio to the *sampler* at `ratio_level`. It is
    exp of the mean log-ratio of a sample's tokens ("sequence_mean"), of their sum
    ("sequence_sum"), or of each token, of which the objective is then the mean ("token"). With
    several turns, the terms of a candidate's samples are weighted by their tokens. With sums and
    `baseline` far from 1/K this term outweighs `ListwiseLoss` by orders of magnitude.
    """

    coeff: float = 1.0
    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.2
    baseline: float | None = None
    ratio_level: RatioLevel = "sequence_mean"

    def __post_init__(self) -> None:
        check_clip(self.clip_eps_low, self.clip_eps_high)
        check_value("ratio_level", self.ratio_level, choices=get_args(RatioLevel))

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        base = shared.sample_column("uniform_weight") if self.baseline is None else self.baseline
        advantage_B1 = (shared.sample_column("listwise_weight") - base)[:, None]
        log_ratio = shared.log_ratio
        if self.ratio_level != "token":
            log_ratio = log_ratio.sum(dim=1, keepdim=True)
            if self.ratio_level == "sequence_mean":
                log_ratio = log_ratio / shared.token_counts[:, None]
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        objective = clipped_objective(ratio, advantage_B1, self.clip_eps_low, self.clip_eps_high)
        clipped = out_of_range(ratio, self.clip_eps_low, self.clip_eps_high)
        if self.ratio_level == "token":
            objective_B = weigh_values(objective, shared.token_mask).sum(dim=1) / shared.token_counts
            clipped_B = weigh_values(clipped, shared.token_mask).sum(dim=1) / shared.token_counts
        else:
            objective_B, clipped_B = objective[:, 0], clipped[:, 0]
        scale = shared.sample_column("row_share") * shared.sample_column("candidates_per_group")
        loss = -self.coeff * (scale * objective_B).mean()
        return loss, {"loss": loss.detach(), "sample_clip_frac": clipped_B.mean()}
