"""KL towards a reference that does not change during training, as a penalty and as statistics.

With d_t = log pi_ref - log pi of the n action tokens of the samples (k3, Schulman 2020):

    reference/kl             mean over tokens of exp(d) - d - 1
    reference/sequence_kl    sum_b n_b k3(mean of d over sample b) / sum_b n_b, as the document's
    reference/tokens         n
    reference/kl_bucket/X    the same as reference/kl for samples of X action tokens

A micro-batch reports sums, so the statistics of a step are exact means over its tokens, for any
split into micro-batches and over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ludic.errors import ConfigError
from ludic.training.coefficients import Coefficient
from ludic.training.loss.base import ActionLoss, check_token_normalizer, row_mean
from ludic.training.loss.batch import Normalizer, Stats
from ludic.training.loss.context import SharedContext
from ludic.training.loss.kl import Estimator, check_estimator, estimate_kl
from ludic.training.loss.logprobs import mask_values, weigh_values

KLLevel = Literal["token", "sequence"]
PREFIX = "reference/"
BUCKETS = (32, 64, 128, 256)
BUCKET_NAMES = ("0-32", "33-64", "65-128", "129-256", "257+")


@dataclass
class ReferenceKLLoss(ActionLoss):
    """L = coeff * mean of k(log pi - log pi_ref) over tokens, a KL penalty towards the reference.

    The estimators k are defined in `TokenKLLoss`. As a loss on samples of the policy, k3, the
    default, has the expected gradient of KL(pi_ref || pi), k2 of KL(pi || pi_ref), k1 none.
    `level="sequence"`, the form of liv-daliberti/maxent-grpo (2026): every token has k of its
    sample's mean log-ratio. It is never above the token's k3, and blind to log-ratios that cancel
    within an answer. The mean is over the action tokens of the mini-batch; with
    `normalizer="samples"` over samples, of each sample's sum, or with `length_normalize` its mean.
    Set both as in the policy loss, as presets do: the penalty then weighs the same at every length.
    `coeff` may be a `Coefficient`, which is read each time. The reference is a constant.
    """

    coeff: float | Coefficient = 0.01
    estimator: Estimator = "k3"
    level: KLLevel = "token"
    length_normalize: bool = False
    normalizer: Normalizer = "tokens"

    reads_reference = True

    def __post_init__(self) -> None:
        check_estimator(self.estimator)
        if self.level not in ("token", "sequence"):
            raise ConfigError(f"level ({self.level!r}) must be 'token' or 'sequence'")
        check_token_normalizer(self.normalizer, self.length_normalize)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        mask = shared.token_mask
        log_ratio = mask_values(shared.token_logp - shared.reference_logp, mask)
        if self.level == "token":
            kl = estimate_kl(log_ratio, self.estimator)
        else:
            mean = weigh_values(log_ratio, mask).sum(dim=1, keepdim=True) / shared.token_counts[:, None]
            kl = estimate_kl(mean, self.estimator).expand_as(mask)
        loss = float(self.coeff) * row_mean(kl, shared, length_normalize=self.length_normalize, normalizer=self.normalizer)
        return loss, {"loss": loss.detach()}


def sum_reference(shared: SharedContext) -> Stats:
    """Return sums over one micro-batch, as detached scalars on its device. Empty without a
    reference, or if the loss has not computed the current log-probabilities."""
    if "reference_logps" not in shared.batch or not shared.has_computed_logp:
        return {}
    mask = shared.token_mask
    log_ratio = mask_values(shared.current_logp - shared.reference_logp, mask).detach()
    kl_B = weigh_values(estimate_kl(log_ratio, "k3"), mask).sum(dim=1)
    tokens_B = mask.sum(dim=1)
    sequence = (tokens_B * estimate_kl(weigh_values(log_ratio, mask).sum(dim=1) / shared.token_counts, "k3")).sum()
    sums = {"tokens": tokens_B.sum(), "k3_sum": kl_B.sum(), "seq_k3_sum": sequence}
    bucket_B = torch.bucketize(tokens_B, tokens_B.new_tensor(BUCKETS))
    for name, values_B in (("bucket_k3", kl_B), ("bucket_tokens", tokens_B)):
        summed = values_B.new_zeros(len(BUCKET_NAMES)).index_add(0, bucket_B, values_B)
        sums |= {f"{name}/{bucket}": value for bucket, value in zip(BUCKET_NAMES, summed.unbind(), strict=True)}
    return {f"{PREFIX}{name}": value for name, value in sums.items()}


def is_reference_sum(key: str) -> bool:
    """Whether the statistic `key` comes from `sum_reference`."""
    return key.startswith(PREFIX)


def compute_reference(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics of a step, by full key, from the sums over its micro-batches. Empty if
    there were no tokens; a bucket without samples has no key."""
    part = {key.removeprefix(PREFIX): value for key, value in sums.items() if is_reference_sum(key)}
    if not part or not float(part["tokens"]):
        return {}
    tokens = part["tokens"]
    stats = {"kl": part["k3_sum"] / tokens, "sequence_kl": part["seq_k3_sum"] / tokens, "tokens": tokens}
    for bucket in BUCKET_NAMES:
        counted = part.get(f"bucket_tokens/{bucket}", 0.0)
        if float(counted):
            stats[f"kl_bucket/{bucket}"] = part[f"bucket_k3/{bucket}"] / counted
    return {f"{PREFIX}{name}": value for name, value in stats.items()}
