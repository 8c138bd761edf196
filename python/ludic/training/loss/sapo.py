"""SAPO: a smooth gate on the ratio instead of a clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ludic.errors import check_value
from ludic.training.loss.base import ActionLoss, check_token_normalizer, row_mean
from ludic.training.loss.batch import Normalizer, Stats
from ludic.training.loss.context import SharedContext
from ludic.training.loss.statistics import masked_means, policy_stats, population_std


@dataclass
class SAPOLoss(ActionLoss):
    """L = -mean_b sum_t (4 / tau_b) sigmoid(tau_b (r_bt - 1)) A_b; r_bt is the ratio of token t,
    tau_b is tau_pos if A_b > 0, else tau_neg. A batch with `token_weight` has A_bt in place of A_b.

    Soft Adaptive Policy Optimization (arXiv:2511.20347). The gradient is
    4 p (1 - p) r_bt A_b grad log pi_bt, where p is the sigmoid. At r = 1 it equals the gradient of
    the unclipped surrogate; it decreases on both sides, faster for a larger tau. Nothing is
    detached. With `length_normalize`, as in the paper, the sum over tokens is divided by their
    number; `normalizer="tokens"` takes one mean over all action tokens of the batch.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    length_normalize: bool = False
    normalizer: Normalizer = "samples"

    zero_weight_is_zero_gradient = True

    def __post_init__(self) -> None:
        for name, tau in (("tau_pos", self.tau_pos), ("tau_neg", self.tau_neg)):
            check_value(name, tau, above=0)
        check_token_normalizer(self.normalizer, self.length_normalize)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        advantage = shared.token_weight
        tau = torch.where(advantage > 0, self.tau_pos, self.tau_neg)
        gate = torch.sigmoid(tau * (shared.ratio - 1.0))
        objective = 4.0 / tau * gate * advantage
        loss = -row_mean(objective, shared, length_normalize=self.length_normalize, normalizer=self.normalizer)
        slope = 4.0 * gate.detach() * (1.0 - gate.detach())
        return loss, {
            "loss": loss.detach(),
            **policy_stats(shared, shared.ratio),
            **masked_means(shared, grad_weight_mean=slope),
            "grad_weight_std": population_std(slope, shared.token_mask),
        }
