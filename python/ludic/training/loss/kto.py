"""Kahneman-Tversky optimization: a loss of single answers that are desirable or not. Shapes: B
samples, P pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ludic.errors import check_value
from ludic.training.loss.base import ActionLoss, ScoreType
from ludic.training.loss.batch import Stats, read_column
from ludic.training.loss.context import SharedContext
from ludic.training.loss.dpo import sum_log_ratios
from ludic.training.loss.preference import Index


@dataclass
class KTOLoss(ActionLoss):
    """L = mean_i d w_D sigma(beta (z_0 - rho)) + (1 - d) w_U sigma(beta (rho - z_0)), over samples,
    with the log-ratio rho = sum_t log pi(a_t) - log pi_ref(a_t), and d = 1 for a desirable answer,
    0 for an undesirable one. Both samples of a pair count: d is the label for the chosen one, and
    1 - label for the rejected one.

    Ethayarajh et al. 2024 (arXiv:2402.01306), eq. 7 and 8, up to a constant. z_0 >= 0 estimates the
    KL divergence from the reference and has no gradient: the mean of rho over answers to other
    prompts. `DPOTrainer` gives each prompt the answer before it in the data, as TRL, and computes
    z_0 once a step from all its samples on all ranks. TRL has a z_0 for each micro-batch, so its
    gradient depends on the split; with one micro-batch both are equal. With several optimizer steps
    on a batch, z_0 is the one before the first.

    The batch needs `meta` with `role` and `label`, `reference_logps`, and z_0 as `kl` [B].
    """

    beta: float = 0.1
    """How much the policy is held to the reference: less moves it further."""
    desirable_weight: float = 1.0
    """w_D. If desirable answers are rare, raise it until both kinds weigh about the same."""
    undesirable_weight: float = 1.0
    """w_U."""

    reads_reference = True
    score_type: ScoreType = "logprob"

    def __post_init__(self) -> None:
        check_value("beta", self.beta, "0.1 is customary", above=0, below=math.inf)
        for name in ("desirable_weight", "undesirable_weight"):
            check_value(name, getattr(self, name), least=0, below=math.inf)

    def rewards(self, sums: Tensor, counts: Tensor) -> Tensor:
        """[N] implicit rewards, from the log-ratios."""
        return self.beta * sums

    def of_answers(self, ratio: Tensor, desirable: Tensor, kl: Tensor | float) -> Tensor:
        """[B] the loss of each answer, from [B] log-ratios and [B] d."""
        z = self.beta * (ratio - kl)
        return desirable * self.desirable_weight * (-z).sigmoid() + (1 - desirable) * self.undesirable_weight * z.sigmoid()

    def of_pairs(self, sums: Tensor, counts: Tensor, pairs: tuple[Index, Index], label: Tensor, kl: float = 0.0) -> Tensor:
        """[P] the mean loss of the two answers of each pair."""
        return (self.of_answers(sums[pairs[0]], label, kl) + self.of_answers(sums[pairs[1]], 1 - label, kl)) / 2

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        meta, kl = shared.batch["meta"], read_column(shared.batch, "kl", "train with DPOTrainer, which estimates it")
        ratio, logps = sum_log_ratios(shared), shared.logp_action().detach()
        labels = [float(y) if role == "chosen" else 1 - float(y) for role, y in zip(meta["role"], meta["label"], strict=True)]
        desirable, present = ratio.new_tensor(labels), shared.token_mask.any(dim=1)  # a row without actions stands for no sample
        loss = (self.of_answers(ratio, desirable, kl) * present).mean()
        right = (ratio.detach() - kl) * (desirable - 0.5) > 0
        stats: Stats = {"loss": loss.detach(), "kl": kl.mean(), "rewards/accuracies": right.float().mean()}
        for name, those in (("chosen", (desirable > 0.5) & present), ("rejected", (desirable <= 0.5) & present)):
            stats[f"num_{name}"] = count = those.sum()
            for key, values in (("rewards", self.beta * ratio.detach()), ("logps", logps)):
                stats[f"{key}/{name}"] = (values * those).sum() / count.clamp(min=1)
        return loss, stats
