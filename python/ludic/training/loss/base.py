"""What a loss is, what it may know of the batch it is part of, and how micro-batches add up to the
unsplit loss.

A loss is the mean over the samples (or tokens) of the batch that it is called on. The trainer calls
it on micro-batches, so it multiplies each result by the micro-batch's **share** of the whole
mini-batch: the shares add up to one, and so the gradients add up to that of the unsplit batch.
Statistics over "the batch", such as a baseline, come from `BatchTotals` for the same reason.

Shapes: B rows, T tokens, V vocabulary, S tokens of a padding-free batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ludic.errors import ConfigError, ConfigTypeError, DataError
from ludic.training.loss.functional import (
    LogitsUse,
    compute_token_entropy,
    compute_token_logp,
    compute_token_logp_and_entropy,
    masked,
    with_scaled_gradient,
)

Batch = Mapping[str, Any]
"""A collated micro-batch. Padded: `input_ids`, `attention_mask`, `action_mask` [B, T], `weight`
[B], and with log-probabilities of the actor `actor_logps` [B, T], `old_logp_action` [B].
Padding-free: rows stand one behind another in [1, S], `cu_seqlens` [B + 1] says where each
begins, and a collated one has `max_seqlen`, an `int`. With `turns` [N, 3] several samples share
a row: N samples, of which each has a weight, and its row, begin and end are in `turns`.
Preference samples have `meta`, lists of B `pair_id`, `role` and `label`."""
Stats = dict[str, Any]
"""Detached scalars on the device of the logits."""
Normalizer = Literal["samples", "tokens", "pairs"]
"""What a loss is a mean over."""


class Correction(Protocol):
    """Weighs tokens by how far the trainer and the sampler are apart on them (`correction`)."""

    def weights(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """[B, T - 1] weights, from log pi_trainer - log pi_sampler at the same weights [B, T -
        1], 0 off the actions, and the mask."""
        ...


class Loss(Protocol):
    """One formula. `compute` may leave `shared` out; it then computes log-probabilities of its own.

    It returns the loss and statistics, scalars by name. `loss` among these is the detached loss;
    another number of that name is logged as `reported_loss`.

    Four attributes are read where present. `normalizer` (default `samples`).
    `zero_weight_is_zero_gradient` (default False): whether a sample of weight 0 adds nothing to the
    gradient, so that its forward pass can be left out. `reads_shared_only` (default False): whether
    the logits are read through `shared` alone, so that their memory can be used again in the
    backward pass; set it to False on an instance to keep the logits. `reads_entropy` (default
    False): whether `shared.entropy` is read, so that it is computed together with the
    log-probabilities; read without being announced, it costs the memory of two more gradients.

    A loss that must know more of the whole mini-batch than `BatchTotals` counts, a norm of scores
    for example, has `needs_first_pass` and a method `first_pass(logits, batch) -> dict[str,
    Tensor]`: sums over the samples of a micro-batch. The model is then run twice, first without
    gradient, and the sums over all micro-batches and ranks are in `BatchTotals.measured`.
    """

    def compute(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Stats]: ...


@dataclass(frozen=True)
class BatchTotals:
    """What a loss must know of the whole mini-batch: all samples of one optimizer step, over all
    ranks."""

    num_samples: float
    num_tokens: float
    """Action tokens that are predicted: those at positions >= 1."""
    weight_mean: float
    weight_std: float
    """Population standard deviation."""
    num_pairs: float = 0.0
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    """What a loss with a first pass measured, by name."""

    @classmethod
    def from_columns(cls, weights: NDArray[Any], target_counts: NDArray[Any], *, num_pairs: float = 0.0) -> BatchTotals:
        """weights [N] and predicted action tokens [N] of every sample, those of weight zero
        among them."""
        wide = np.asarray(weights, dtype=np.float64)
        return cls(
            num_samples=float(len(wide)),
            num_tokens=float(np.asarray(target_counts, dtype=np.int64).sum()),
            weight_mean=float(wide.mean()) if len(wide) else 0.0,
            weight_std=float(wide.std()) if len(wide) else 0.0,
            num_pairs=num_pairs,
        )

    @classmethod
    def from_batch(cls, batch: Batch) -> BatchTotals:
        """The totals of a batch that is not part of a larger one."""
        weight = batch.get("weight")
        rows = num_rows(batch)
        known = isinstance(weight, Tensor) and weight.numel() > 0
        wide = weight.detach().cpu().double() if known and isinstance(weight, Tensor) else None
        return cls(
            num_samples=float(rows),
            num_tokens=float(num_targets(batch)),
            weight_mean=0.0 if wide is None else float(wide.mean()),
            weight_std=0.0 if wide is None else float(wide.std(unbiased=False)),
            num_pairs=num_pairs(batch),
        )

    def of(self, normalizer: Normalizer) -> float:
        """The denominator of a mean over `normalizer`."""
        return {"samples": self.num_samples, "tokens": self.num_tokens, "pairs": self.num_pairs}[normalizer]


def num_rows(batch: Batch) -> int:
    """Samples in a collated batch."""
    if "turns" in batch:
        return int(batch["turns"].shape[0])
    if "cu_seqlens" in batch:
        return int(batch["cu_seqlens"].shape[0]) - 1
    return int(batch["input_ids"].shape[0])


def num_pairs(batch: Batch) -> float:
    """Pairs in a collated batch: ids in its `meta` that have both roles; without one, two
    samples are a pair."""
    meta = batch.get("meta", {})
    if "pair_id" not in meta or "role" not in meta:
        return num_rows(batch) / 2
    halves = {*zip(meta["pair_id"], meta["role"], strict=True)}
    return float(sum((pair, "rejected") in halves for pair, role in halves if role == "chosen"))


def num_targets(batch: Batch) -> Tensor:
    """[] action tokens of a collated batch that have a token before them in their row. Stays on
    the device."""
    mask: Tensor = batch["action_mask"]
    if "cu_seqlens" in batch:
        starts = batch["cu_seqlens"][:-1].long()
        return mask.sum(dtype=torch.int64) - mask[0, starts].sum(dtype=torch.int64)
    return mask[:, 1:].sum(dtype=torch.int64)


class SharedContext:
    """What losses on one batch have in common, computed once when first asked for. It alone knows
    how the batch is laid out:
    every `[B, T - 1]` quantity below has that shape for padded and for padding-free batches, and
    one row a sample where several samples share one of the model's."""

    def __init__(
        self,
        logits: Tensor,
        batch: Batch,
        *,
        totals: BatchTotals | None = None,
        consume_logits: bool = False,
        wide: bool = True,
        with_entropy: bool = False,
        temperature: float = 1.0,
        correction: Correction | None = None,
    ) -> None:
        """`consume_logits`: nobody reads the logits after the backward pass, which may then
        write over them. `wide`: compute in float32 whatever the dtype of the logits.
        `with_entropy`: the entropy will be asked for. `temperature`: the policy is that of
        logits / temperature. `correction`: how tokens are weighed that the policy and its
        sampler judge differently."""
        self.logits = logits
        self.batch = batch
        self._totals = totals
        self._use = LogitsUse(consume=consume_logits, wide=wide, temperature=temperature)
        self._with_entropy = with_entropy
        self._correction = correction

    @cached_property
    def totals(self) -> BatchTotals:
        """Totals of the mini-batch, or of this batch if it stands alone."""
        return BatchTotals.from_batch(self.batch) if self._totals is None else self._totals

    def share(self, normalizer: Normalizer) -> float | Tensor:
        """This batch's part of the mini-batch, in [0, 1]. 1 for a batch that stands alone. A
        count of tokens stays on the device."""
        if self._totals is None:
            return 1.0
        total = self._totals.of(normalizer)
        if total <= 0:
            return 0.0
        if normalizer == "tokens":
            return (num_targets(self.batch) / total).float()
        return (num_rows(self.batch) if normalizer == "samples" else num_pairs(self.batch)) / total

    @property
    def input_ids(self) -> Tensor:
        """[B, T] or [1, S] ids as collated."""
        ids: Tensor = self.batch["input_ids"]
        return ids

    @property
    def action_mask(self) -> Tensor:
        """[B, T] or [1, S] action mask as collated."""
        mask: Tensor = self.batch["action_mask"]
        return mask

    @cached_property
    def token_logp(self) -> Tensor:
        """[B, T - 1] log-probability of each next token. With a correction its gradient, and
        nothing else, is multiplied by the weight of the token: for whatever loss is made of it,
        that weighs the token's own part of the gradient."""
        if self._correction is None:
            return self.measured_logp
        return with_scaled_gradient(self.measured_logp, self.correction_weight)

    @cached_property
    def measured_logp(self) -> Tensor:
        """[B, T - 1] log-probability of each next token, before any correction."""
        if self._with_entropy:
            return self._logp_and_entropy[0]
        return self._rows(compute_token_logp(self.logits, self.input_ids, use=self._use))

    @cached_property
    def behaviour_logp(self) -> Tensor:
        """[B, T - 1] log-probability of each next token as the sampler gave it."""
        if "actor_logps" not in self.batch:
            raise KeyError("the batch has no actor_logps; sample with ReturnSpec.for_rl() so that every sample carries them")
        return self._of_tokens("actor_logps")

    @cached_property
    def proximal_logp(self) -> Tensor:
        """[B, T - 1] the same under the trainer's own weights as the step began: the batch's
        where it has them, else the present ones, which is the same thing in the first optimizer
        step of a batch."""
        return self._of_tokens("proximal_logps") if "proximal_logps" in self.batch else self.measured_logp.detach()

    @property
    def knows_logp(self) -> bool:
        """Whether the log-probabilities were asked for, so that reading them costs nothing."""
        return "measured_logp" in vars(self)

    @property
    def has_correction(self) -> bool:
        """Whether tokens are weighed."""
        return self._correction is not None

    @cached_property
    def correction_weight(self) -> Tensor:
        """[B, T - 1] weight of each token's gradient; 1 without a correction and off the
        actions. No gradient flows through it."""
        if self._correction is None:
            return torch.ones_like(self.token_mask)
        log_ratio = masked(self.proximal_logp - self.behaviour_logp, self.token_mask).detach()
        return self._correction.weights(log_ratio, self.token_mask)

    @cached_property
    def entropy(self) -> Tensor:
        """[B, T - 1] entropy of the distribution of each next token, in nats."""
        if self._with_entropy:
            return self._logp_and_entropy[1]
        return self._rows(compute_token_entropy(self.logits, use=self._use))

    @cached_property
    def _logp_and_entropy(self) -> tuple[Tensor, Tensor]:
        logp, entropy = compute_token_logp_and_entropy(self.logits, self.input_ids, use=self._use)
        return self._rows(logp), self._rows(entropy)

    @cached_property
    def token_mask(self) -> Tensor:
        """[B, T - 1] 1.0 where the next token is an action."""
        return self._rows(self.action_mask[:, 1:].float())

    @cached_property
    def token_counts(self) -> Tensor:
        """[B] action tokens of each row, at least 1."""
        return self.token_mask.sum(dim=1).clamp(min=1.0)

    @cached_property
    def actor_logps_shifted(self) -> Tensor:
        """[B, T - 1] log-probability of each next token under the policy that ratios are taken
        against: the one that sampled it, or, with a correction, the trainer's own at the
        beginning of the step."""
        return self.behaviour_logp if self._correction is None else self.proximal_logp

    def _of_tokens(self, key: str) -> Tensor:
        """[B, T - 1] of a batch's [B, T] log-probabilities."""
        logps: Tensor = self.batch[key]
        if logps.shape != self.input_ids.shape:
            raise DataError(f"{key} {tuple(logps.shape)} must have the shape of input_ids {tuple(self.input_ids.shape)}")
        return self._rows(logps[:, 1:].float())

    @cached_property
    def log_ratio(self) -> Tensor:
        """[B, T - 1] log of policy over actor, 0 off the actions."""
        return masked(self.token_logp - self.actor_logps_shifted, self.token_mask)

    @cached_property
    def ratio(self) -> Tensor:
        """[B, T - 1] policy over actor, 1 off the actions."""
        return self.log_ratio.exp()

    @property
    def weight(self) -> Tensor:
        """[B] credit."""
        if "weight" not in self.batch:
            raise KeyError("the batch has no weight; collate it with collate_saw_items")
        weight: Tensor = self.batch["weight"]
        return weight

    def logp_action(self, *, length_normalize: bool = False) -> Tensor:
        """[B] log-probability of each row's action, a mean over its tokens if
        `length_normalize`."""
        summed = masked(self.token_logp, self.token_mask).sum(dim=1)
        return summed / self.token_counts if length_normalize else summed

    def old_logp_action(self, key: str, *, length_normalize: bool = False) -> Tensor:
        """[B] the same under the policy that sampled, from `batch[key]`."""
        if key not in self.batch:
            raise KeyError(f"the batch has no {key!r}; sample with ReturnSpec.for_rl() so that collation can add it")
        old: Tensor = self.batch[key]
        if self._correction is not None:
            old = masked(self.proximal_logp, self.token_mask).sum(dim=1)
        return old / self.token_counts if length_normalize else old

    def _rows(self, shifted: Tensor) -> Tensor:
        """Values as collated, [rows, T - 1] or [1, S - 1], to one row a sample, [B, T - 1],
        zero-padded."""
        if self._own_tokens is None:
            return shifted
        source, sample, column, shape = self._own_tokens
        return shifted.new_zeros(shape).index_put((sample, column), shifted.reshape(-1)[source])

    @property
    def token_places(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where in the flattened shifted batch each token of a sample lies, with its sample and
        column; None where every sample is a row of the batch."""
        return None if self._own_tokens is None else self._own_tokens[:3]

    @cached_property
    def _own_tokens(self) -> tuple[Tensor, Tensor, Tensor, tuple[int, int]] | None:
        """Where each token that a sample predicts lies in the flattened shifted values, and its
        sample and column; None where every sample is a row already. The first token of a row is
        predicted by none."""
        if "turns" not in self.batch and "cu_seqlens" not in self.batch:
            return None
        offset, begin, end = self._spans()
        first = begin.clamp(min=1)
        counts = (end - first).clamp(min=0)
        sample = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        column = torch.arange(len(sample), device=counts.device) - (counts.cumsum(0) - counts)[sample]
        source = (offset + first)[sample] - 1 + column
        return source, sample, column, (len(counts), max(1, int(counts.max())))

    def _spans(self) -> tuple[Tensor, Tensor, Tensor]:
        """[B] of each sample: where the shifted values of its row begin, and where in the row
        its own tokens begin and end."""
        if "cu_seqlens" in self.batch:
            bounds = self.batch["cu_seqlens"].long()
            starts, lengths = bounds[:-1], bounds.diff()
        else:
            rows, width = self.input_ids.shape
            starts = torch.arange(rows, device=self.input_ids.device) * (width - 1)
            lengths = starts.new_full((rows,), width)
        if "turns" not in self.batch:
            return starts, torch.zeros_like(starts), lengths
        row, begin, end = self.batch["turns"].unbind(dim=1)
        return starts[row], begin, end


def of_actions(values: Tensor, batch: Batch) -> list[Tensor]:
    """Per-token values [B, T - 1] of a context, those of the action tokens alone: one [A] a
    sample, the same however it is laid out."""
    mask = SharedContext(batch["input_ids"], batch).token_mask.bool()
    return [row[kept] for row, kept in zip(values, mask, strict=True)]


def as_collated(rows: Sequence[Tensor | None], batch: Batch) -> Tensor:
    """Values of each sample's action tokens, as `of_actions` gives them, laid out like the
    `input_ids` of `batch`. 0 elsewhere, and where a sample has none."""
    ids: Tensor = batch["input_ids"]
    context = SharedContext(ids, batch)
    values = torch.zeros_like(context.token_mask)
    for index, row in enumerate(rows):
        if row is not None:
            values[index, context.token_mask[index].bool()] = row.to(values)
    shifted = ids.shape[0], ids.shape[1] - 1
    if context.token_places is None:
        flat = values
    else:
        source, sample, column = context.token_places
        flat = values.new_zeros(shifted[0] * shifted[1]).index_put((source,), values[sample, column])
    return torch.nn.functional.pad(flat.view(shifted), (1, 0))


def scaled_loss(loss: Loss, logits: Tensor, batch: Batch, shared: SharedContext) -> tuple[Tensor, Stats]:
    """The loss of a micro-batch times its share of the mini-batch: summed over the micro-batches
    it is the unsplit loss."""
    value, stats = call_loss(loss, logits, batch, shared)
    stats = _with_reported_loss(value, stats)
    if getattr(loss, "scales_itself", False):
        return value, stats
    return value * shared.share(normalizer_of(loss)), stats


def _with_reported_loss(value: Tensor, stats: Stats) -> Stats:
    """The trainer logs the loss that it differentiates as `loss`. Where a loss reports another
    number under that name than the value it returns (detached, they share their memory), it is
    logged beside it as `reported_loss`."""
    reported = stats.get("loss")
    if reported is None or (isinstance(reported, Tensor) and reported.data_ptr() == value.data_ptr()):
        return stats
    return {**stats, "reported_loss": reported}


def call_loss(loss: Loss, logits: Tensor, batch: Batch, shared: SharedContext) -> tuple[Tensor, Stats]:
    """`loss.compute`, with the shared context if it takes one."""
    parameters = inspect.signature(loss.compute).parameters
    takes_shared = "shared" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    keywords: dict[str, Any] = {"shared": shared} if takes_shared else {}
    given: object = loss.compute(logits, batch, **keywords)
    if not isinstance(given, tuple) or len(given) != 2:
        raise ConfigTypeError(
            f"compute of {type(loss).__name__} returned {type(given).__name__}; it must return the loss and its statistics: "
            '`return loss, {"loss": loss.detach()}`'
        )
    return given


def normalizer_of(loss: object) -> Normalizer:
    """What the loss is a mean over."""
    normalizer: Normalizer = getattr(loss, "normalizer", "samples")
    return normalizer


def zero_weight_is_zero_gradient(loss: object) -> bool:
    """Whether samples of weight 0 can be left out of the forward pass."""
    return bool(getattr(loss, "zero_weight_is_zero_gradient", False))


def reads_shared_only(loss: object) -> bool:
    """Whether the loss reads the logits through its shared context alone."""
    return bool(getattr(loss, "reads_shared_only", False))


def needs_first_pass(loss: object) -> bool:
    """Whether the loss must see every sample before it can be computed on any."""
    return bool(getattr(loss, "needs_first_pass", False))


def reads_entropy(loss: object) -> bool:
    """Whether the loss asks its shared context for the entropy."""
    return bool(getattr(loss, "reads_entropy", False))


def row_mean(values: Tensor, shared: SharedContext, *, length_normalize: bool, normalizer: Normalizer) -> Tensor:
    """Mean of per-token values [B, T - 1] over the actions: by row, its sum or
    (length_normalize) its mean, then over rows; or, with `normalizer="tokens"`, over all action
    tokens of the batch at once (DAPO, arXiv:2503.14476, eq. 8)."""
    sums = masked(values, shared.token_mask).sum(dim=1)
    if normalizer == "tokens":
        return sums.sum() / shared.token_mask.sum().clamp(min=1.0)
    return (sums / shared.token_counts if length_normalize else sums).mean()


def check_token_normalizer(normalizer: Normalizer, length_normalize: bool) -> None:
    """A mean over tokens leaves no room for one by row."""
    if normalizer not in ("samples", "tokens"):
        raise ConfigError(f"normalizer ({normalizer!r}) must be 'samples' or 'tokens'")
    if normalizer == "tokens" and length_normalize:
        raise ConfigError("normalizer='tokens' and length_normalize=True exclude each other; choose one mean")


def check_clip(low: float | None, high: float) -> None:
    """Both sides of a clip range are distances from 1."""
    for name, value in (("clip_eps_low", low), ("clip_eps_high", high)):
        if value is not None and value < 0:
            raise ConfigError(f"{name} must be non-negative, got {value}")


def check_ratio_clip(ratio_clip: float | None) -> None:
    if ratio_clip is not None and ratio_clip <= 0:
        raise ConfigError(f"ratio_clip must be positive, got {ratio_clip}; None turns it off")
