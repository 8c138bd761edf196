"""Losses as functions of logits: supervised, GRPO, PPO. They call the `Loss` classes of
`ludic.training.loss`, so there is one formula of each.

Labels are not shifted by the caller: `labels` are the token ids of the row, and `logits[:, t]` is
read as the prediction of `labels[:, t + 1]`. The first token of a row is predicted by nothing.
Example: for labels [a b c], logits[0] predicts b and logits[1] predicts c. A label of -100 is
masked. Per-token values (masks, advantages, log-probabilities) are aligned with the labels.

A backend recognises these functions, also with arguments bound by `functools.partial`, and trains
with the class behind them, which can be split into micro-batches.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from torch import Tensor

from ludic.errors import ConfigError, DataError, check_value
from ludic.training.loss.base import Loss, row_mean
from ludic.training.loss.batch import Normalizer, Stats
from ludic.training.loss.clipped import ClippedSurrogateLoss, TokenClippedSurrogateLoss
from ludic.training.loss.context import SharedContext
from ludic.training.loss.logprobs import mask_values
from ludic.training.loss.statistics import estimate_kl
from ludic.training.loss.supervised import MaskedCausalLMCrossEntropyLoss

IGNORED = -100
"""The label of a token that is not trained."""
Aggregation = Literal["token", "sequence", "constant"]
STD_EPS = 1e-8


def sft_loss(logits: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
    """-sum m_t log p(label_t) / sum m_t over all tokens of the batch: the loss of a Hugging Face
    causal model. logits [B, T, V], labels [B, T] int64, loss_mask [B, T]; result [] float32."""
    return _compute(SFT_LOSS, logits, _batch(logits, labels, loss_mask))[0]


def grpo_loss(logits: Tensor, labels: Tensor, loss_mask: Tensor, advantages: Tensor) -> Tensor:
    """-mean_b A_b sum_t m_bt log p(label_bt) / max(sum_t m_bt, 1).

    logits [B, T, V], labels [B, T] int64, loss_mask [B, T], advantages [B], or [B, T] for an
    advantage of each token; result [] float32. This is the policy gradient of GRPO (DeepSeekMath,
    arXiv:2402.03300, eq. 3, without its KL term) at a ratio of 1: for the first optimizer step on
    samples of the present policy. Later steps need `ppo_loss`.
    """
    return _compute(GRPO_LOSS, logits, _batch(logits, labels, loss_mask, advantages))[0]


def ppo_loss(
    logits: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor,
    clip_range: float = 0.2,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    aggregation: Aggregation = "token",
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    return_metrics: bool = False,
) -> Any:
    """PPO's clipped objective, with its sign turned: `PPOLoss` of one batch.

    logits [B, T, V], labels [B, T] int64, loss_mask [B, T], advantages [B] or [B, T]. old_log_probs
    [B, T] belong to the tokens under the policy that sampled them; [B] are their means over the
    tokens of each row, and the ratio is then one per row (GSPO). ref_log_probs [B, T] is needed for
    `kl_coef`. Returns [] float32; with `return_metrics` (loss, statistics).
    """
    loss = PPOLoss(clip_range, clip_low, clip_high, dual_clip, aggregation, kl_coef, entropy_coef)
    batch = _batch(logits, labels, loss_mask, advantages)
    if ref_log_probs is not None:
        batch["ref_log_probs"] = _check_shape("ref_log_probs", ref_log_probs, labels)
    if old_log_probs.ndim == 1:
        batch["old_logp_action"] = sum_of_means(_check_shape("old_log_probs", old_log_probs, labels[:, 0]), batch["action_mask"])
    else:
        batch["actor_logps"] = _check_shape("old_log_probs", old_log_probs, labels)
    value, stats = _compute(loss, logits, batch)
    return (value, stats) if return_metrics else value


@dataclass
class PPOLoss(Loss):
    """L = -agg min(r_bt A_bt, clip(r_bt, 1 - low, 1 + high) A_bt) + kl_coef agg k3_bt
    - entropy_coef agg H_bt, where r_bt is the ratio of a token to the policy that sampled it.

    PPO (arXiv:1707.06347, eq. 7) with the asymmetric range of DAPO (arXiv:2503.14476, eq. 10) and
    the dual clip of arXiv:1912.09729, eq. 5. `agg` is, by `aggregation`:

    - `token`: one mean over all tokens (DAPO, eq. 8);
    - `sequence`: the mean over the tokens of a row, then over rows (GRPO, arXiv:2402.03300, eq. 3);
    - `constant`: the sum over the tokens of a row, then the mean over rows, as in Dr. GRPO
      (arXiv:2503.20783). Its division by a constant length is left to the learning rate.

    k3 = exp(ref - logp) - 1 + logp - ref estimates KL(policy || reference). A batch that has
    `old_logp_action` [B] without `actor_logps` has one ratio per row, the geometric mean over its
    tokens, and its terms are means over rows whatever `aggregation` says (GSPO, arXiv:2507.18071,
    eq. 5 to 7).
    """

    clip_range: float = 0.2
    clip_low: float | None = None
    """None: `clip_range`."""
    clip_high: float | None = None
    """None: `clip_range`."""
    dual_clip: float | None = None
    """No ratio counts more than this where the advantage is negative. At least 1 + high."""
    aggregation: Aggregation = "token"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    reads_shared_only = True
    reads_actions_only = True
    scales_itself = True  # whether terms are means over tokens or rows depends on the batch

    def __post_init__(self) -> None:
        check_value("aggregation", self.aggregation, choices=get_args(Aggregation))
        low = self.clip_range if self.clip_low is None else self.clip_low
        high = self.clip_range if self.clip_high is None else self.clip_high
        if self.dual_clip is not None and self.dual_clip < 1 + high:
            raise ConfigError(f"dual_clip ({self.dual_clip}) must be at least 1 + clip_high ({1 + high})")
        self.reads_entropy = self.entropy_coef != 0
        self.zero_weight_is_zero_gradient = self.kl_coef == 0 and self.entropy_coef == 0
        self._normalizer: Normalizer = "tokens" if self.aggregation == "token" else "samples"
        self._length_normalize = self.aggregation == "sequence"
        self._per_row = ClippedSurrogateLoss(low, high, ratio_clip=self.dual_clip, length_normalize=True)
        self._per_token = TokenClippedSurrogateLoss(low, high, self._length_normalize, self.dual_clip, self._normalizer)

    def compute_from(self, shared: SharedContext) -> tuple[Tensor, Stats]:
        per_row = "actor_logps" not in shared.batch and "old_logp_action" in shared.batch
        if not per_row and "actor_logps" not in shared.batch:
            raise DataError("ppo_loss needs Sample.rollout_log_probs, or the column old_log_probs of backend.forward_logprobs")
        if per_row and "token_weight" in shared.batch:
            raise DataError("old_log_probs [B] have one ratio per row, so the advantages must be [B] too, not [B, T]")
        normalizer: Normalizer = "samples" if per_row else self._normalizer
        loss, stats = (self._per_row if per_row else self._per_token).compute_from(shared)

        def aggregate(values: Tensor) -> Tensor:
            return row_mean(values, shared, length_normalize=per_row or self._length_normalize, normalizer=normalizer)

        if self.kl_coef:
            if "ref_log_probs" not in shared.batch:
                raise DataError("kl_coef needs ref_log_probs [B, T], log-probabilities under the reference policy")
            log_ratio = shared.token_logp - shared.read_logps("ref_log_probs")
            kl = aggregate(estimate_kl(mask_values(log_ratio, shared.token_mask), "k3"))
            loss, stats["ref_kl"] = loss + self.kl_coef * kl, kl.detach()
        if self.entropy_coef:
            entropy = aggregate(shared.entropy)
            loss, stats["entropy"] = loss - self.entropy_coef * entropy, entropy.detach()
        scaled = loss * shared.mini_batch_share(normalizer)
        return scaled, {**stats, "loss": scaled.detach()}


GRPO_LOSS = MaskedCausalLMCrossEntropyLoss(length_normalize=True)
SFT_LOSS = MaskedCausalLMCrossEntropyLoss(length_normalize=False, normalizer="tokens")


def compute_group_advantages(rewards: Sequence[float], group_indices: Sequence[Any], normalize_std: bool = False) -> list[float]:
    """reward - mean of its group; with `normalize_std` divided by the population standard deviation
    of the group + 1e-8. [B] rewards and group indices, which need not be in order.

    Example: rewards [1, 0, 3] of groups [a, a, b] have the advantages [0.5, -0.5, 0].
    """
    if len(rewards) != len(group_indices):
        raise DataError(f"there are {len(rewards)} rewards and {len(group_indices)} group indices; each reward needs one")
    rows: dict[Any, list[int]] = {}
    for row, group in enumerate(group_indices):
        rows.setdefault(group, []).append(row)
    advantages = np.asarray(rewards, dtype=np.float64)
    for members in rows.values():
        centred = advantages[members] - advantages[members].mean()
        advantages[members] = centred / (centred.std() + STD_EPS) if normalize_std else centred
    values: list[float] = advantages.tolist()
    return values


def sum_of_means(means: Tensor, action_mask: Tensor) -> Tensor:
    """[B] sums over the predicted tokens from their means. Example: a mean of -0.5 over a mask
    [0, 1, 1] is a sum of -1."""
    return means * action_mask[:, 1:].float().sum(dim=1).clamp(min=1.0)


def _batch(logits: Tensor, labels: Tensor, loss_mask: Tensor, advantages: Tensor | None = None) -> dict[str, Any]:
    """A padded batch for a `Loss`. Ignored labels become id 0, and their mask 0."""
    if logits.ndim != 3:
        raise DataError(f"logits must be [B, T, V], got {tuple(logits.shape)}")
    _check_shape("labels", labels, logits[..., 0])
    ignored = labels == IGNORED
    mask = _check_shape("loss_mask", loss_mask, labels).float().masked_fill(ignored, 0.0)
    batch: dict[str, Any] = {"input_ids": labels.masked_fill(ignored, 0), "action_mask": mask}
    if advantages is not None and advantages.ndim == 1:
        batch["weight"] = _check_shape("advantages", advantages, labels[:, 0])
    elif advantages is not None:
        batch["token_weight"] = _check_shape("advantages", advantages, labels)
        batch["weight"] = advantages.mean(dim=1)  # for statistics
    return batch


def _check_shape(name: str, values: Tensor, like: Tensor) -> Tensor:
    if values.shape != like.shape:
        raise DataError(f"{name} {tuple(values.shape)} must have the shape {tuple(like.shape)}, which follows from the logits")
    return values


def _compute(loss: Loss, logits: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Stats]:
    return loss.compute_from(SharedContext(logits, batch, with_entropy=loss.reads_entropy))
