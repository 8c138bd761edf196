"""A collated micro-batch, and the totals of its mini-batch that a loss can read.

Shapes: B samples, T tokens of a padded row, S tokens of a padding-free batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludic.errors import DataKeyError

Batch = Mapping[str, Any]
"""A collated micro-batch, in one of three layouts:

- Padded: `input_ids`, `attention_mask`, `action_mask` [B, T], `weight` [B]; if the samples have
  sampled log-probabilities, also `actor_logps` [B, T] and their sums `old_logp_action` [B].
- Padding-free: the sequences are concatenated, [1, S]. `cu_seqlens` [B + 1] has the offset of each
  sequence and the total length; `max_seqlen` is an `int`.
- Merged turns: several samples share a row. `turns` [B, 3] has the row, begin and end of each
  sample's own tokens. Combines with either layout above.

A training step can add columns: `proximal_logps` and `reference_logps` in the layout of
`input_ids`, columns of the batch credit [B], and for losses that ask for them `hidden` and
`position` (`Loss.reads_hidden`, `Loss.gathers`). Samples may bring `candidates`, [B, T, K] in the
layout of `input_ids`: the ids that each action token was sampled among, plus 1; 0 where there is
none.

Batches of preference samples also have `meta`: lists of length B of `pair_id`, `role` and
`label`."""
Stats = dict[str, Any]
"""Detached scalars on the device of the logits."""
Normalizer = Literal["samples", "tokens", "pairs"]
"""What a loss is a mean over."""
LOG_RATIO_BOUND = "log_ratio_bound"
"""Column [B] of a batch: what `bound` of the correction returned for the whole training step."""


CANDIDATES = "candidates"
PREFERRED_TOKENS, PREFERRED_LENGTH = "preferred_tokens", "preferred_length"
"""Names of the number of predicted action tokens, and of all predicted tokens, of the preferred
samples of all pairs."""


class Correction(Protocol):
    """Weights the gradient of each token by the difference between trainer and sampler; see
    `loss.correction`."""

    @property
    def weights(self) -> Callable[..., Tensor]:
        """A method `weights(log_ratio, mask)`, the [B, T - 1] weights of the tokens' gradients.

        `log_ratio` [B, T - 1] is proximal_logp - sampler_logp (`loss.context`), 0 outside the
        action tokens; `mask` [B, T - 1] is 1 on the action tokens, or the fraction that they
        count for, which the loss itself multiplies by. A class with `reads_shared = True` also gets
        the `SharedContext` as `shared`. One with `bound(log_ratio)` is shown the [N] log-ratios of
        a training step, and the batch has what it returns as `LOG_RATIO_BOUND`.
        """
        ...


@dataclass(frozen=True)
class BatchTotals:
    """Counts and moments of a mini-batch: all samples of one optimizer step, on all ranks."""

    num_samples: float
    num_tokens: float
    """Number of predicted action tokens: those at positions >= 1 of their row. Tokens that count in
    part make it a fraction."""
    weight_mean: float
    weight_std: float
    """Population standard deviation."""
    num_pairs: float = 0.0
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    """Sums from `Loss.first_pass`, by name; for the names of `Loss.gathers`, [N, ...] rows. Of
    pairs, `PREFERRED_TOKENS` and `PREFERRED_LENGTH`."""

    @classmethod
    def from_columns(cls, weights: NDArray[Any], target_counts: NDArray[Any], *, num_pairs: float = 0.0) -> BatchTotals:
        """Totals from the [N] weights and [N] predicted action tokens of all samples, including
        those with weight 0."""
        wide = np.asarray(weights, dtype=np.float64)
        return cls(
            num_samples=float(len(wide)),
            num_tokens=float(np.asarray(target_counts, dtype=np.float64).sum()),
            weight_mean=float(wide.mean()) if len(wide) else 0.0,
            weight_std=float(wide.std()) if len(wide) else 0.0,
            num_pairs=num_pairs,
        )

    @classmethod
    def from_batch(cls, batch: Batch) -> BatchTotals:
        """Totals of a batch that is not part of a larger one."""
        weight = batch.get("weight")
        wide = weight.detach().cpu().double() if isinstance(weight, Tensor) and weight.numel() > 0 else None
        return cls(
            num_samples=float(num_rows(batch)),
            num_tokens=float(num_targets(batch)),
            weight_mean=0.0 if wide is None else float(wide.mean()),
            weight_std=0.0 if wide is None else float(wide.std(unbiased=False)),
            num_pairs=num_pairs(batch),
        )

    def denominator(self, normalizer: Normalizer) -> float:
        """Return the denominator of a mean over `normalizer`."""
        return {"samples": self.num_samples, "tokens": self.num_tokens, "pairs": self.num_pairs}[normalizer]


def read_column(batch: Batch, name: str, remedy: str = "") -> Tensor:
    """The column of a collated batch. Raises DataKeyError, which ends with the `remedy`, if there
    is none."""
    if name not in batch:
        raise DataKeyError(f"the batch has no {name}{f'; {remedy}' if remedy else ''}")
    column: Tensor = batch[name]
    return column


def num_rows(batch: Batch) -> int:
    """Number of samples in a collated batch."""
    if "turns" in batch:
        return int(batch["turns"].shape[0])
    if "cu_seqlens" in batch:
        return int(batch["cu_seqlens"].shape[0]) - 1
    return int(batch["input_ids"].shape[0])


def num_pairs(batch: Batch) -> float:
    """Number of pairs in a collated batch: the ids in its `meta` that occur with both roles.
    Without `meta`, half the number of samples.

    Example: ids [p, p, q] with roles [chosen, rejected, chosen] are 1 pair.
    """
    meta = batch.get("meta", {})
    if "pair_id" not in meta or "role" not in meta:
        return num_rows(batch) / 2
    halves = {*zip(meta["pair_id"], meta["role"], strict=True)}
    return float(sum((pair, "rejected") in halves for pair, role in halves if role == "chosen"))


def num_targets(batch: Batch) -> Tensor:
    """[] number of predicted action tokens: those with a token before them in their row. The result
    stays on the device.

    Example: padding-free rows [a b c] and [d e], cu_seqlens [0, 3, 5], all five tokens are actions.
    a and d are first in their row, so 5 - 2 = 3 tokens are predicted. If d, e count 1/2 each, it is
    2.5. In float32 whole numbers are exact up to 2**24.
    """
    mask: Tensor = batch["action_mask"]
    if "cu_seqlens" in batch:
        starts = batch["cu_seqlens"][:-1].long()
        return mask.sum(dtype=torch.float32) - mask[0, starts].sum(dtype=torch.float32)
    return mask[:, 1:].sum(dtype=torch.float32)
