"""Estimators of KL, and statistics that losses report: detached scalars, which stay on the
device of the logits.

Shapes: B samples, T tokens. Per-token values are [B, T - 1]; only action tokens count.

The `mismatch/*` statistics are of the difference between the trainer's log-probabilities and those
that the sampler reported. With d_t = proximal_logp - sampler_logp (`loss.context`) of all n action
tokens, and w_t = exp(d_t):

    mismatch/mean      mean of |d|, in nats
    mismatch/max       largest |d|
    mismatch/kl        mean of w - 1 - d, an unbiased estimate of KL(sampler || trainer)
                       that is never negative (k3, Schulman 2020)
    mismatch/ess       (sum w)^2 / (n sum w^2), in (0, 1]: effective sample size under
                       importance weights w, as a fraction of the tokens
    mismatch/tokens    n

The `reference/*` statistics are of the KL towards a reference that does not change during training.
With d_t = log pi_ref - log pi of the n action tokens of the samples (k3, Schulman 2020):

    reference/kl             mean over tokens of exp(d) - d - 1
    reference/sequence_kl    sum_b n_b k3(mean of d over sample b) / sum_b n_b, as the document's
    reference/tokens         n
    reference/kl_bucket/X    the same as reference/kl for samples of X action tokens

The comparison with the sampler is valid only if the trainer uses the sampling temperature
(`TrainerConfig.temperature`). For both a micro-batch reports sums, so the statistics of a step are
exact means over its tokens, for any split into micro-batches and over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ludic.training.loss.batch import Stats
from ludic.training.loss.context import SharedContext
from ludic.training.loss.logprobs import mask_values, weigh_values

Estimator = Literal["k1", "k2", "k3"]
"""Estimators of KL(pi || pi_old), with log_ratio = log pi - log pi_old. k1: log_ratio; unbiased,
but its gradient is zero in expectation on samples of pi itself. k2: log_ratio^2 / 2. k3:
exp(-log_ratio) - 1 + log_ratio, as in GRPO."""

MISMATCH = "mismatch/"
MISMATCH_MAX = "abs_max"
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to [-20, 20]: exp(20) is 5e8, which would dominate any mean."""
REFERENCE = "reference/"
BUCKETS = (32, 64, 128, 256)
BUCKET_NAMES = ("0-32", "33-64", "65-128", "129-256", "257+")


def estimate_kl(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    """Estimate KL(pi || pi_old) for each entry of `log_ratio`, log pi - log pi_old."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    return torch.expm1(-log_ratio) + log_ratio


def policy_stats(shared: SharedContext, ratio: Tensor) -> Stats:
    """The statistics of every loss with token ratios [B, T - 1]. `kl_actor_policy` is computed from
    the ratios without a cap."""
    advantage = shared.mean_weight
    return {
        **masked_means(shared, ratio_mean=ratio, kl_actor_policy=actor_policy_kl(shared.log_ratio)),
        "ratio_std": population_std(ratio, shared.token_mask),
        "adv_mean": advantage.mean(),
        "adv_std": population_std(advantage),
        "logp_mean": shared.logp_action().detach().mean(),
        "avg_action_tokens": shared.token_mask.sum(dim=1).mean(),
    }


def masked_means(shared: SharedContext, **values: Tensor) -> Stats:
    """Mean of each tensor of [B, T - 1] values over the action tokens; 0 if there are none."""
    mask = shared.token_mask
    count = mask.sum().clamp(min=1.0)
    return {name: weigh_values(value.detach(), mask).sum() / count for name, value in values.items()}


def population_std(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Population standard deviation of [B] values, or, with a mask, of [B, T - 1] values over the
    action tokens."""
    values = values.detach()
    if mask is None:
        return values.std(unbiased=False)
    count = mask.sum().clamp(min=1.0)
    mean = (values * mask).sum() / count
    return (((values - mean) ** 2 * mask).sum() / count).sqrt()


def actor_policy_kl(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r: the k3 estimate of KL(pi_old || pi) from samples of pi_old, r = pi / pi_old.
    It is never negative (Schulman, "Approximating KL divergence", 2020)."""
    log_ratio = log_ratio.detach()
    return torch.expm1(log_ratio) - log_ratio


def out_of_range(ratio: Tensor, low: float, high: float) -> Tensor:
    """1.0 where the ratio is outside [1 - low, 1 + high], else 0.0."""
    ratio = ratio.detach()
    return ((ratio < 1.0 - low) | (ratio > 1.0 + high)).float()


def reached_cap(ratio: Tensor, ratio_clip: float | None) -> Tensor:
    """1.0 where the ratio is at least `ratio_clip`, else 0.0; 0.0 everywhere without a cap."""
    if ratio_clip is None:
        return torch.zeros_like(ratio.detach())
    return (ratio.detach() >= ratio_clip).float()


def sum_mismatch(shared: SharedContext) -> Stats:
    """Return sums over one micro-batch, as detached scalars on its device. Empty if the batch
    has no sampled log-probabilities, or if the loss has not computed the current ones: these
    statistics cause no extra computation."""
    if "actor_logps" not in shared.batch or not shared.has_computed_logp:
        return {}
    mask = shared.token_mask
    difference = mask_values(shared.proximal_logp - shared.sampler_logp, mask).detach()
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = bounded.exp()
    sums = {
        "tokens": mask.sum(),
        "abs_sum": (difference.abs() * mask).sum(),
        "abs_max": difference.abs().max(),
        "kl_sum": ((torch.expm1(bounded) - bounded) * mask).sum(),
        "ratio_sum": (ratio * mask).sum(),
        "ratio_square_sum": (ratio.square() * mask).sum(),
    }
    if shared.has_correction:
        weight = shared.correction_weight * mask
        sums |= {"gradient_weight_sum": weight.sum(), "gradient_kept_sum": ((weight != 0) & (mask != 0)).float().sum()}
    return {f"{MISMATCH}{name}": value for name, value in sums.items()}


def is_mismatch_sum(key: str) -> bool:
    """Whether the statistic `key` comes from `sum_mismatch`."""
    return key.startswith(MISMATCH)


def compute_mismatch(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics of a step, by full key, from the sums over its micro-batches and the
    maximum `abs_max`. Empty if there were no tokens."""
    part = {key.removeprefix(MISMATCH): value for key, value in sums.items() if is_mismatch_sum(key)}
    if not part or not float(part["tokens"]):
        return {}
    tokens = part["tokens"]
    stats = {
        "mean": part["abs_sum"] / tokens,
        "max": part[MISMATCH_MAX],
        "kl": part["kl_sum"] / tokens,
        "ess": part["ratio_sum"] ** 2 / (tokens * part["ratio_square_sum"]),
        "tokens": tokens,
    }
    if "gradient_weight_sum" in part:
        stats |= {
            "correction_weight": part["gradient_weight_sum"] / tokens,
            "correction_kept": part["gradient_kept_sum"] / tokens,
        }
    return {f"{MISMATCH}{name}": value for name, value in stats.items()}


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
    return {f"{REFERENCE}{name}": value for name, value in sums.items()}


def is_reference_sum(key: str) -> bool:
    """Whether the statistic `key` comes from `sum_reference`."""
    return key.startswith(REFERENCE)


def compute_reference(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics of a step, by full key, from the sums over its micro-batches. Empty if
    there were no tokens; a bucket without samples has no key."""
    part = {key.removeprefix(REFERENCE): value for key, value in sums.items() if is_reference_sum(key)}
    if not part or not float(part["tokens"]):
        return {}
    tokens = part["tokens"]
    stats = {"kl": part["k3_sum"] / tokens, "sequence_kl": part["seq_k3_sum"] / tokens, "tokens": tokens}
    for bucket in BUCKET_NAMES:
        counted = part.get(f"bucket_tokens/{bucket}", 0.0)
        if float(counted):
            stats[f"kl_bucket/{bucket}"] = part[f"bucket_k3/{bucket}"] / counted
    return {f"{REFERENCE}{name}": value for name, value in stats.items()}
