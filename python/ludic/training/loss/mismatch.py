"""`mismatch/*` statistics: the difference between the trainer's log-probabilities and those that
the sampler reported.

With d_t = proximal_logp - sampler_logp (`loss.context`) of all n action tokens, and w_t = exp(d_t):

    mismatch/mean      mean of |d|, in nats
    mismatch/max       largest |d|
    mismatch/kl        mean of w - 1 - d, an unbiased estimate of KL(sampler || trainer)
                       that is never negative (k3, Schulman 2020)
    mismatch/ess       (sum w)^2 / (n sum w^2), in (0, 1]: effective sample size under
                       importance weights w, as a fraction of the tokens
    mismatch/tokens    n

The comparison is valid only if the trainer uses the sampling temperature
(`TrainerConfig.temperature`). A micro-batch reports sums, so the statistics of a step are exact
means over its tokens for any split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ludic.training.loss.batch import Stats
from ludic.training.loss.context import SharedContext
from ludic.training.loss.logprobs import mask_values

PREFIX = "mismatch/"
LARGEST = "abs_max"
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to [-20, 20]: exp(20) is 5e8, which would dominate any mean."""


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
    return {f"{PREFIX}{name}": value for name, value in sums.items()}


def is_mismatch_sum(key: str) -> bool:
    """Whether the statistic `key` comes from `sum_mismatch`."""
    return key.startswith(PREFIX)


def compute_mismatch(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics of a step, by full key, from the sums over its micro-batches and the
    maximum `abs_max`. Empty if there were no tokens."""
    part = {key.removeprefix(PREFIX): value for key, value in sums.items() if is_mismatch_sum(key)}
    if not part or not float(part["tokens"]):
        return {}
    tokens = part["tokens"]
    stats = {
        "mean": part["abs_sum"] / tokens,
        "max": part[LARGEST],
        "kl": part["kl_sum"] / tokens,
        "ess": part["ratio_sum"] ** 2 / (tokens * part["ratio_square_sum"]),
        "tokens": tokens,
    }
    if "gradient_weight_sum" in part:
        stats |= {
            "correction_weight": part["gradient_weight_sum"] / tokens,
            "correction_kept": part["gradient_kept_sum"] / tokens,
        }
    return {f"{PREFIX}{name}": value for name, value in stats.items()}
