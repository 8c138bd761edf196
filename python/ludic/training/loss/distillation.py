"""The divergence of the policy's distributions from a teacher's, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ludic.errors import check_value
from ludic.training.loss.base import Loss, check_token_normalizer, row_mean
from ludic.training.loss.batch import Normalizer, Stats, read_column
from ludic.training.loss.context import SharedContext
from ludic.training.loss.logprobs import CHUNK_ELEMENTS
from ludic.training.loss.statistics import masked_means

Divergence = Literal["forward", "reverse", "jsd"]
TEACHER_LOGITS = "teacher_logits"
"""Name of the teacher's logits in the batch of a loss with `reads_teacher`."""


@dataclass
class DistillationLoss(Loss):
    """L = mean of D(pi_T(. | y_<t), pi(. | y_<t)) over the action tokens, on samples of the policy
    or given ones (GKD, arXiv:2306.13649). Weights of samples are not read.

    D is `forward` KL(pi_T || pi), `reverse` KL(pi || pi_T), or `jsd` (GKD, eq. 1), b = `jsd_beta`:
    b KL(pi_T || m) + (1 - b) KL(pi || m) with m = b pi_T + (1 - b) pi. The gradient is exact for
    given prefixes; how a sampled token changes later prefixes is left out, as in GKD. With `top_k`,
    D is between the k likeliest tokens of the teacher and one more outcome, any other token: never
    above the whole D, and equal to it for k = V. The mean is as in `ReferenceKLLoss`. Both
    distributions have the temperature of the policy. Of vocabularies that are padded to different
    sizes, the tokens of the smaller one count.
    """

    divergence: Divergence = "reverse"
    top_k: int | None = None
    jsd_beta: float = 0.5
    length_normalize: bool = False
    normalizer: Normalizer = "tokens"

    reads_teacher = True

    def __post_init__(self) -> None:
        check_value("divergence", self.divergence, choices=get_args(Divergence))
        check_value("top_k", self.top_k, "None is the whole vocabulary", optional=True, whole=True, least=1)
        check_value("jsd_beta", self.jsd_beta, "take forward or reverse for the limits", above=0, below=1)
        check_token_normalizer(self.normalizer, self.length_normalize)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        theirs = read_column(shared.batch, TEACHER_LOGITS, "set the teacher of the RLAlgorithm")
        size = min(theirs.shape[-1], shared.logits.shape[-1])
        acts = shared.action_mask[:, 1:] != 0
        pair = [logits[:, :-1, :size][acts] / shared.temperature for logits in (shared.logits, theirs)]
        parts = zip(*(each.split(max(1, CHUNK_ELEMENTS // size)) for each in pair), strict=True)
        # A chunk's distributions are computed again in the backward pass, instead of kept.
        values_N = torch.cat([checkpoint(self._diverge, *part, use_reentrant=False) for part in parts])
        values = shared.by_sample(values_N.new_zeros(acts.shape).masked_scatter(acts, values_N))
        loss = row_mean(values, shared, length_normalize=self.length_normalize, normalizer=self.normalizer)
        return loss, {"loss": loss.detach(), **masked_means(shared, divergence=values)}

    def _diverge(self, logits_NV: Tensor, teacher_NV: Tensor) -> Tensor:
        """[N] D of each row, in float32 or wider."""
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        least = torch.finfo(wide).min / 4  # p log p is 0 where p is 0
        policy, teacher = (each.log_softmax(dim=-1, dtype=wide).clamp(min=least) for each in (logits_NV, teacher_NV))
        if self.top_k is not None and self.top_k < logits_NV.shape[1]:
            top = teacher.topk(self.top_k, dim=-1).indices
            policy, teacher = _merge_rest(policy, top), _merge_rest(teacher, top)
        if self.divergence == "forward":
            return _kl(teacher, policy)
        if self.divergence == "reverse":
            return _kl(policy, teacher)
        b = self.jsd_beta
        mixture = torch.logaddexp(teacher + math.log(b), policy + math.log1p(-b))
        return b * _kl(teacher, mixture) + (1 - b) * _kl(policy, mixture)


def _merge_rest(logp_NV: Tensor, top_NK: Tensor) -> Tensor:
    """[N, K + 1] the log-probabilities of the tokens `top_NK`, and of all others together."""
    rest = logp_NV.scatter(1, top_NK, -math.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([logp_NV.gather(1, top_NK), rest], dim=-1)


def _kl(left: Tensor, right: Tensor) -> Tensor:
    return (left.exp() * (left - right)).sum(dim=-1)
