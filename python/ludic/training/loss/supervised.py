"""Cross entropy on the action tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ludic.training.loss.base import ActionLoss, check_token_normalizer, row_mean
from ludic.training.loss.batch import Normalizer, Stats
from ludic.training.loss.context import SharedContext
from ludic.training.loss.statistics import masked_means


@dataclass
class MaskedCausalLMCrossEntropyLoss(ActionLoss):
    """L = mean_b w_b mean_t(-log pi_bt) over the action tokens, in float32.

    Without `length_normalize` the mean over t is a sum; `normalizer="tokens"` takes one mean over
    all action tokens, as is usual for causal language models. If the batch has no `weight`, every
    weight is 1. A batch with `token_weight` has w_bt in place of w_b.
    """

    length_normalize: bool = True
    normalizer: Normalizer = "samples"

    zero_weight_is_zero_gradient = True

    def __post_init__(self) -> None:
        check_token_normalizer(self.normalizer, self.length_normalize)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        nll = -shared.token_logp
        weighted = nll * shared.token_weight if "weight" in shared.batch else nll
        loss = row_mean(weighted, shared, length_normalize=self.length_normalize, normalizer=self.normalizer)
        return loss, {
            "loss": loss.detach(),
            "logp_mean": shared.logp_action(length_normalize=self.length_normalize).detach().mean(),
            **masked_means(shared, nll_mean=nll),
            "avg_action_tokens": shared.token_mask.sum(dim=1).mean(),
        }
