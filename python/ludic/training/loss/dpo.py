"""Direct preference optimization: losses of preference pairs that need no reward model. `loss.kto`
has the one of single answers. Shapes: B samples, P pairs, T tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, expm1, finfo, where
from torch.nn.functional import logsigmoid

from ludic.errors import ConfigError, check_value
from ludic.training.loss.base import ActionLoss, ScoreType
from ludic.training.loss.batch import PREFERRED_LENGTH, PREFERRED_TOKENS, Stats, num_pairs
from ludic.training.loss.context import SharedContext
from ludic.training.loss.logprobs import weigh_values
from ludic.training.loss.preference import Index, find_pairs

DPOLossType = Literal["sigmoid", "ipo", "robust", "cpo", "simpo", "orpo"]
REFERENCE_FREE = ("cpo", "simpo", "orpo")
STATISTICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected", "num_pairs"),
)

TIE = 1e-6
"""A difference of two log-ratios is a tie if it is at most this share of the two answers' summed
|log-probabilities|: it is float32 rounding, and its sign depends on the processor. A tie counts as
wrong."""


def sum_log_ratios(shared: SharedContext) -> Tensor:
    """[B] rho, the sum of log pi - log pi_ref over the action tokens of each sample."""
    return weigh_values(shared.token_logp - shared.reference_logp, shared.token_mask).sum(dim=1)


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

    `cpo`, `simpo` and `orpo` have no reference: rho = sum_t log pi(a_t).

    - `cpo`: l(h) of `sigmoid`, plus `cpo_alpha` times -log pi of the preferred answers. Xu et al.
      2024 (arXiv:2401.08417), eq. 5.
    - `simpo`: l(h) = -log sigma(beta h - gamma), each rho divided by its tokens. Meng et al. 2024
      (arXiv:2405.14734), eq. 6. With `cpo_alpha` it is CPO-SimPO.
    - `orpo`: l(h) = -beta log sigma(h), with rho the log of the odds p / (1 - p), where log p is
      the mean of log pi(a_t), plus -log pi of the preferred samples with their prompts. Hong et al.
      2024 (arXiv:2403.07691), eq. 6; beta is lambda there.

    Both terms of -log pi are means over all these tokens of the mini-batch, as in TRL; the
    equations have a mean over samples.

    The log-probabilities of the reference are constants; nothing else is detached. The rewards in
    the statistics are the implicit ones of DPO's eq. 5, beta rho, with sums over tokens; for
    `simpo` and `orpo` beta times the mean of log pi. The batch needs `meta` with `pair_id`, `role`
    and `label`, and `reference_logps` for a reference. Samples of incomplete pairs are ignored.
    """

    beta: float = 0.1
    """How much the policy is held to the reference: less moves it further. For `simpo` 2 to 10."""
    loss_type: DPOLossType = "sigmoid"
    label_smoothing: float = 0.0
    """eps: the probability that a label is wrong. In [0, 0.5). Not for `simpo` and `orpo`."""
    length_normalize: bool | None = None
    """Divide each log-ratio by the number of action tokens. None means for `ipo` alone. True with
    `sigmoid` is TRL's `sigmoid_norm`."""
    nll_coeff: float = 0.0
    """Weight of a second term, the mean over pairs of -log pi of the chosen answer divided by its
    action tokens: Pang et al. 2024 (arXiv:2404.19733), eq. 1, where it is alpha. It keeps the
    chosen answers likely; DPO alone may make both answers of a pair unlikely. For the first three
    losses."""
    cpo_alpha: float | None = None
    """Weight of the second term of `cpo` and `simpo`. None means 1 for `cpo`, 0 for `simpo`."""
    simpo_gamma: float | None = None
    """gamma: by how much the reward of the preferred answer should be larger. None means 0.5."""

    normalizer = "pairs"
    score_type: ScoreType = "logprob"

    def __post_init__(self) -> None:
        check_value("beta", self.beta, "0.1 is customary", above=0, below=math.inf)
        check_value("loss_type", self.loss_type, choices=get_args(DPOLossType))
        check_value("label_smoothing", self.label_smoothing, least=0, below=0.5)
        check_value("nll_coeff", self.nll_coeff, "0 leaves the term out", least=0, below=math.inf)
        for name in ("cpo_alpha", "simpo_gamma"):
            check_value(name, getattr(self, name), least=0, below=math.inf, optional=True)
        others = {"cpo": ["simpo_gamma"], "simpo": ["label_smoothing"], "orpo": ["label_smoothing", "cpo_alpha", "simpo_gamma"]}
        own = ["nll_coeff", "length_normalize"] if self.loss_type in others else ["cpo_alpha", "simpo_gamma"]
        for name in (*own, *others.get(self.loss_type, ())):
            if getattr(self, name):
                raise ConfigError(f"{name} ({getattr(self, name)}) is no setting of loss_type={self.loss_type}; leave it out")

    @property
    def reads_reference(self) -> bool:  # type: ignore[override]  # follows from the settings
        """Not for `REFERENCE_FREE`."""
        return self.loss_type not in REFERENCE_FREE

    @property
    def reads_actions_only(self) -> bool:  # type: ignore[override]
        """Not for `orpo`."""
        return self.loss_type != "orpo"

    @property
    def divides_by_length(self) -> bool:
        """Whether each log-ratio in the loss is divided by the number of action tokens."""
        return self.loss_type in ("ipo", "simpo", "orpo") if self.length_normalize is None else self.length_normalize

    @property
    def nll_weight(self) -> float:
        """Weight of the second term."""
        if self.loss_type in ("cpo", "simpo") and self.cpo_alpha is not None:
            return self.cpo_alpha
        return {"cpo": 1.0, "orpo": 1.0}.get(self.loss_type, self.nll_coeff)

    def rewards(self, sums: Tensor, counts: Tensor) -> Tensor:
        """[N] implicit rewards, from sums over action tokens and the numbers of these tokens."""
        return self.beta * (sums / counts if self.divides_by_length and not self.reads_reference else sums)

    def of_pairs(self, sums: Tensor, counts: Tensor, pairs: tuple[Index, Index], label: Tensor, kl: float = 0.0) -> Tensor:
        """[P] the loss of each pair, without the second term, from the same, the rows of the pairs
        and [P] labels. `kl` is for KTO."""
        rho = sums / counts if self.divides_by_length else sums
        if self.loss_type == "orpo":  # a p that rounds to 1 counts as the number before
            rho = rho - (-expm1(rho.clamp(max=-finfo(rho.dtype).eps))).log()
        return self.of_differences(rho[pairs[0]] - rho[pairs[1]], label)

    def of_differences(self, h: Tensor, label: Tensor) -> Tensor:
        """[P] the loss of each pair, from [P] differences h and [P] labels."""
        preferred, other = self._one_order(h), self._one_order(-h)
        eps = 0.0 if self.loss_type == "robust" else self.label_smoothing
        y = label * (1 - eps) + (1 - label) * eps
        return y * preferred + (1 - y) * other

    def _one_order(self, h: Tensor) -> Tensor:
        if self.loss_type == "ipo":
            return (h - 1 / (2 * self.beta)).square()
        if self.loss_type == "orpo":
            return -self.beta * logsigmoid(h)
        if self.loss_type == "simpo":
            return -logsigmoid(self.beta * h - (0.5 if self.simpo_gamma is None else self.simpo_gamma))
        if self.loss_type in ("sigmoid", "cpo"):
            return -logsigmoid(self.beta * h)
        eps = self.label_smoothing
        return -((1 - eps) * logsigmoid(self.beta * h) - eps * logsigmoid(-self.beta * h)) / (1 - 2 * eps)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        chosen, rejected, labels = find_pairs(shared.batch)
        if not labels:
            zero = shared.zero()
            names = [*STATISTICS, *(["nll_loss"] if self.nll_weight else [])]
            return zero, {"loss": zero.detach(), **dict.fromkeys(names, zero.detach())}
        logps = shared.logp_action()
        ratio, label = sum_log_ratios(shared) if self.reads_reference else logps, logps.new_tensor(labels)
        loss = self.of_pairs(ratio, shared.token_counts, (chosen, rejected), label).mean()
        rewards, total = self.rewards(ratio.detach(), shared.token_counts), logps.detach()
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
        if self.nll_weight:

            def preferred(values: Tensor) -> Tensor:
                return where(label >= 0.5, values[chosen], values[rejected])

            by_pair = self.reads_reference  # else by token
            mean = preferred(shared.logp_action(length_normalize=True)).mean() if by_pair else self._token_mean(shared, preferred)
            loss, stats["nll_loss"] = loss - self.nll_weight * mean, -mean.detach()
        return loss, {"loss": loss.detach(), **stats}

    def _token_mean(self, shared: SharedContext, preferred: Callable[[Tensor], Tensor]) -> Tensor:
        """This micro-batch's part of the mean of log pi over the tokens of the preferred samples of
        the mini-batch, divided by the share that the loss is multiplied by later. `preferred`
        selects their values from [B].

        Example: micro-batches of 1 and 3 pairs, with 6 and 4 such tokens. The first has the part
        sum / 10 and the share 1/4, so it returns sum / 2.5.
        """
        orpo, totals = self.loss_type == "orpo", shared.totals
        name, mask = (PREFERRED_LENGTH, shared.read_logps("attention_mask")) if orpo else (PREFERRED_TOKENS, shared.token_mask)
        tokens = preferred(mask.sum(dim=1)).sum()
        if name not in totals.measured and totals.num_pairs > num_pairs(shared.batch):
            raise ConfigError(f"loss_type={self.loss_type} needs {name} of all {totals.num_pairs:.0f} pairs; use DPOTrainer")
        total = totals.measured.get(name, tokens).to(tokens).clamp(min=1.0) * shared.mini_batch_share("pairs")
        return preferred(weigh_values(shared.token_logp, mask).sum(dim=1)).sum() / total
