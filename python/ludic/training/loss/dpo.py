"""Direct preference optimization: losses of preference pairs that need no reward model. Shapes: B
samples, P pairs, T tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, where
from torch.nn.functional import logsigmoid

from ludic.errors import check_value
from ludic.training.loss.base import ActionLoss, ScoreType
from ludic.training.loss.batch import Stats
from ludic.training.loss.context import SharedContext
from ludic.training.loss.logprobs import mask_values, weigh_values
from ludic.training.loss.preference import find_pairs

DPOLossType = Literal["sigmoid", "ipo", "robust"]
STATISTICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected", "num_pairs"),
)

TIE = 1e-6
"""A difference of two log-ratios is a tie if it is at most this share of the two answers' summed
|log-probabilities|: it is float32 rounding, and its sign depends on the processor. A tie counts as
wrong."""


@dataclass
class DPOLoss(ActionLoss):
    """L = mean_p y l(h) + (1 - y) l(-h), with h = rho_c - rho_r, the difference of the two samples'
    log-ratios rho = sum_t log pi(a_t) - log pi_ref(a_t), and y = label (1 - eps) + (1 - label) eps.

    - `sigmoid`: l(h) = -log sigma(beta h). Rafailov et al. 2023 (arXiv:2305.18290), eq. 7. With
      eps, the probability that a label is wrong, it is conservative DPO (Mitchell 2023).
    - `ipo`: l(h) = (h - 1 / (2 beta))^2. Azar et al. 2023 (arXiv:2310.12036), eq. 17, where beta is
      tau. As in TRL, each log-ratio is divided by the number of action tokens of its sample, which
      the equation does not have: without it the target would be reached by length alone.
    - `robust`: l(h) = -[(1 - eps) log sigma(beta h) - eps log sigma(-beta h)] / (1 - 2 eps) with
      y = label: the sigmoid loss of the true labels, without bias, if a share eps of them is wrong.
      rDPO of Chowdhury et al. 2024 (arXiv:2403.00409).

    The log-probabilities of the reference are constants; nothing else is detached. The rewards in
    the statistics are the implicit ones of eq. 5, beta rho, for each of the three with sums over
    tokens. The batch needs `meta` with `pair_id`, `role` and `label`, and `reference_logps`.
    Samples of incomplete pairs are ignored.
    """

    beta: float = 0.1
    """How much the policy is held to the reference: less moves it further."""
    loss_type: DPOLossType = "sigmoid"
    label_smoothing: float = 0.0
    """eps: the probability that a label is wrong. In [0, 0.5)."""
    length_normalize: bool | None = None
    """Divide each log-ratio by the number of action tokens. None means for `ipo` alone. True with
    `sigmoid` is TRL's `sigmoid_norm`."""
    nll_coeff: float = 0.0
    """Weight of a second term, the mean over pairs of -log pi of the chosen answer divided by its
    action tokens: Pang et al. 2024 (arXiv:2404.19733), eq. 1, where it is alpha. It keeps the
    chosen answers likely; DPO alone may make both answers of a pair unlikely."""

    normalizer = "pairs"
    reads_reference = True
    score_type: ScoreType = "logprob"

    def __post_init__(self) -> None:
        check_value("beta", self.beta, "0.1 is customary", above=0, below=math.inf)
        check_value("loss_type", self.loss_type, choices=get_args(DPOLossType))
        check_value("label_smoothing", self.label_smoothing, least=0, below=0.5)
        check_value("nll_coeff", self.nll_coeff, "0 leaves the term out", least=0, below=math.inf)

    @property
    def divides_by_length(self) -> bool:
        """Whether each log-ratio in the loss is divided by the number of action tokens."""
        return self.loss_type == "ipo" if self.length_normalize is None else self.length_normalize

    def of_differences(self, h: Tensor, label: Tensor) -> Tensor:
        """[P] the loss of each pair, from [P] differences h and [P] labels."""
        preferred, other = self._one_order(h), self._one_order(-h)
        eps = 0.0 if self.loss_type == "robust" else self.label_smoothing
        y = label * (1 - eps) + (1 - label) * eps
        return y * preferred + (1 - y) * other

    def _one_order(self, h: Tensor) -> Tensor:
        if self.loss_type == "ipo":
            return (h - 1 / (2 * self.beta)).square()
        if self.loss_type == "sigmoid":
            return -logsigmoid(self.beta * h)
        eps = self.label_smoothing
        return -((1 - eps) * logsigmoid(self.beta * h) - eps * logsigmoid(-self.beta * h)) / (1 - 2 * eps)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        chosen, rejected, labels = find_pairs(shared.batch)
        if not labels:
            zero = shared.zero()
            names = [*STATISTICS, *(["nll_loss"] if self.nll_coeff else [])]
            return zero, {"loss": zero.detach(), **dict.fromkeys(names, zero.detach())}
        log_ratio = mask_values(shared.token_logp - shared.reference_logp, shared.token_mask)
        ratio = weigh_values(log_ratio, shared.token_mask).sum(dim=1)
        used = ratio / shared.token_counts if self.divides_by_length else ratio
        label = ratio.new_tensor(labels)
        loss = self.of_differences(used[chosen] - used[rejected], label).mean()
        rewards, total = self.beta * ratio.detach(), shared.logp_action().detach()
        margin = rewards[chosen] - rewards[rejected]
        tie = (ratio[chosen] - ratio[rejected]).abs() <= TIE * (total[chosen].abs() + total[rejected].abs())
        decided = margin.masked_fill(tie, 0.0)
        stats: Stats = {
            "rewards/chosen": rewards[chosen].mean(),
            "rewards/rejected": rewards[rejected].mean(),
            "rewards/margins": margin.mean(),
            "rewards/accuracies": where(label > 0.5, decided > 0, decided < 0).float().mean(),
            "logps/chosen": total[chosen].mean(),
            "logps/rejected": total[rejected].mean(),
            "num_pairs": margin.new_tensor(float(len(label))),
        }
        if self.nll_coeff:
            logp = shared.logp_action(length_normalize=True)
            nll = -where(label >= 0.5, logp[chosen], logp[rejected]).mean()
            loss, stats["nll_loss"] = loss + self.nll_coeff * nll, nll.detach()
        return loss, {"loss": loss.detach(), **stats}
