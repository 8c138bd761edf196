"""The loss of a critic, and the settings of the critic of PPO."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ludic.errors import check_value
from ludic.training.loss.base import ActionLoss, check_token_normalizer, row_mean
from ludic.training.loss.batch import Normalizer, Stats
from ludic.training.loss.context import SharedContext

VALUES, RETURNS = "values", "returns"
"""Token columns of the batch: the critic's values at the start of the step, and its targets."""


@dataclass
class ValueLoss(ActionLoss):
    """L = 1/2 mean_t max((V_t - R_t)^2, (clip(V_t, V_old - c, V_old + c) - R_t)^2), where V_t is
    the value before token t, V_old the same at the start of the step, and R_t = A_t + V_old the
    return.

    The value loss of PPO (Schulman et al. 2017, arXiv:1707.06347, section 5), with the clip of its
    first implementation, which the paper does not mention; c is `value_clip`, None turns it off.
    The mean is over all action tokens; with `normalizer="samples"` the sum over each sample's
    tokens, then the mean over samples. The batch has the columns `values` and `returns`, without
    gradient. A value beyond the clip that is closer to its target than the clipped one has no
    gradient.

    Statistics, as sums over action tokens: `clipped_tokens`, whose clipped term is the larger one,
    and `tokens`.
    """

    value_clip: float | None = 0.2
    normalizer: Normalizer = "tokens"

    def __post_init__(self) -> None:
        check_value("value_clip", self.value_clip, "None turns it off", optional=True, above=0)
        check_token_normalizer(self.normalizer, length_normalize=False)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        values, returns, mask = shared.values(), shared.read_logps(RETURNS), shared.token_mask
        errors = (values - returns).square()
        if self.value_clip is None:
            worse = errors
        else:
            old = shared.read_logps(VALUES)
            worse = (values.clamp(old - self.value_clip, old + self.value_clip) - returns).square()
        loss = 0.5 * row_mean(torch.maximum(errors, worse), shared, length_normalize=False, normalizer=self.normalizer)
        return loss, {
            "loss": loss.detach(),
            "clipped_tokens": ((worse > errors) * mask).sum().detach(),
            "tokens": mask.sum(),
        }


@dataclass(frozen=True)
class CriticSettings:
    """How values become advantages, and how the critic is trained."""

    gamma: float = 1.0
    """Discount of each token, also from one turn of an episode to the next."""
    lam: float = 1.0
    """1: returns minus values, without bias. Lower: less variance, with the bias of the values."""
    value_clip: float | None = 0.2
    """See `ValueLoss`."""
    lr: float | None = None
    """Constant learning rate. None means 1 / D of a value head on hidden states of width D, else
    the policy's."""
    warmup_steps: int = 0
    """Steps at the beginning in which the critic alone is trained."""
    normalize_adv: bool = True
    """Subtract the mean of the advantages of all action tokens, and divide by their standard
    deviation."""
    bootstrap: bool = False
    """Whether an episode that did not terminate goes on with the value after its last token. If
    False it ends there, as at a limit that belongs to the task: with a value instead, a policy can
    learn to run into the limit."""

    def __post_init__(self) -> None:
        check_value("gamma", self.gamma, "1 does not discount", least=0, most=1)
        check_value("lam", self.lam, "1 takes the whole return, 0 the next value", least=0, most=1)
        check_value("value_clip", self.value_clip, "None turns it off", optional=True, above=0)
        check_value("critic_lr", self.lr, "None takes the default", optional=True, least=0, below=math.inf)
        check_value("critic_warmup_steps", self.warmup_steps, "0 trains the policy immediately", whole=True, least=0)
