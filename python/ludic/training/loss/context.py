"""What all losses on one micro-batch share: log-probabilities, masks, weights, ratios.

Four log-probabilities of a token occur, [B, T - 1] each:

- `sampler_logp`: under the policy that sampled it, as the sampler reported it (`actor_logps` of the
  batch). In papers the behaviour policy.
- `proximal_logp`: under the trainer's own weights at the beginning of the step. It differs from
  `sampler_logp` because another engine, or older weights, sampled.
- `old_logp`: what ratios divide by. The sampler's; with a correction the proximal one.
- `current_logp`: under the model as it is now, with gradient. `token_logp` is the same value; with
  a correction its gradient is weighted token by token.

Shapes: B samples, T tokens of the longest sample. A padded batch is [rows, T], a padding-free one
[1, S], and several samples may share a row. Only this module knows these layouts: a quantity called
[B, T - 1] below has one row a sample in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ludic.errors import DataError
from ludic.training.loss.batch import Batch, BatchTotals, Correction, Normalizer, num_pairs, num_rows, num_targets
from ludic.training.loss.functional import (
    LogitsUse,
    compute_token_entropy,
    compute_token_logp,
    compute_token_logp_and_entropy,
    mask_values,
    scale_gradient,
)


class TokenIndex(NamedTuple):
    """Where the predicted tokens of the samples lie: N tokens, in the order of the samples.

    "Shifted" values are those of a batch without its first column, [rows, T - 1] or [1, S - 1]:
    column t belongs to token t + 1. The first token of a row is predicted by nothing.

    Example: [a b c] and [d e] padding-free are [a b c d e], the shifted values [b c d e]:

        source   0  1  3      of b, c, e; 2 is d, which begins a row
        sample   0  0  1
        column   0  1  0
        shape    (2, 2)       b c
                              e 0
    """

    source: Tensor
    """[N] place in the flattened shifted values."""
    sample: Tensor
    """[N] row of the result."""
    column: Tensor
    """[N] column of the result."""
    shape: tuple[int, int]
    """Of the result: (B, most tokens of one sample)."""


class SharedContext:
    """Quantities of one micro-batch, each computed when a loss first reads it."""

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
        """`totals`: of the mini-batch that this batch is part of. `consume_logits`: nobody reads
        the logits after the backward pass, which may overwrite them. `wide`: compute in float32
        whatever the dtype of the logits. `with_entropy`: the entropy will be read. `temperature`:
        the policy is that of logits / temperature. `correction`: weights the gradients of tokens on
        which trainer and sampler differ."""
        self.logits = logits
        self.batch = batch
        self._totals = totals
        self._use = LogitsUse(consume=consume_logits, wide=wide, temperature=temperature)
        self._with_entropy = with_entropy
        self._correction = correction

    @cached_property
    def totals(self) -> BatchTotals:
        """Totals of the mini-batch; of this batch if it stands alone."""
        return BatchTotals.from_batch(self.batch) if self._totals is None else self._totals

    def mini_batch_share(self, normalizer: Normalizer) -> float | Tensor:
        """This batch's part of the mini-batch, in [0, 1]; 1 for a batch that stands alone. A share
        of tokens is a scalar on the device."""
        if self._totals is None:
            return 1.0
        total = self._totals.denominator(normalizer)
        if total <= 0:
            return 0.0
        if normalizer == "tokens":
            return (num_targets(self.batch) / total).float()
        return (num_rows(self.batch) if normalizer == "samples" else num_pairs(self.batch)) / total

    @property
    def input_ids(self) -> Tensor:
        """[rows, T] or [1, S] ids as collated."""
        ids: Tensor = self.batch["input_ids"]
        return ids

    @property
    def action_mask(self) -> Tensor:
        """[rows, T] or [1, S] action mask as collated."""
        mask: Tensor = self.batch["action_mask"]
        return mask

    @cached_property
    def token_logp(self) -> Tensor:
        """[B, T - 1] log-probability of each next token under the current model. With a correction
        the gradient, and only the gradient, is multiplied by the token's weight, whatever loss is
        computed from it."""
        if self._correction is None:
            return self.current_logp
        return scale_gradient(self.current_logp, self.correction_weight)

    @cached_property
    def current_logp(self) -> Tensor:
        """[B, T - 1] log-probability of each next token under the current model, without the
        correction's weights."""
        if self._with_entropy:
            return self._logp_and_entropy[0]
        return self._by_sample(compute_token_logp(self.logits, self.input_ids, use=self._use))

    @cached_property
    def sampler_logp(self) -> Tensor:
        """[B, T - 1] log-probability of each next token as the sampler reported it."""
        if "actor_logps" not in self.batch:
            raise KeyError("the batch has no actor_logps; sample with ReturnSpec.for_rl() so that every sample carries them")
        return self._logps_of("actor_logps")

    @cached_property
    def proximal_logp(self) -> Tensor:
        """[B, T - 1] log-probability of each next token under the trainer's weights at the
        beginning of the step: the batch's `proximal_logps`, else the current ones, which are the
        same in the first optimizer step of a batch."""
        return self._logps_of("proximal_logps") if "proximal_logps" in self.batch else self.current_logp.detach()

    @cached_property
    def old_logp(self) -> Tensor:
        """[B, T - 1] log-probability of each next token under the policy that ratios divide by."""
        return self.sampler_logp if self._correction is None else self.proximal_logp

    @property
    def actor_logps_shifted(self) -> Tensor:
        """`old_logp`, under the name of earlier versions."""
        return self.old_logp

    @property
    def has_computed_logp(self) -> bool:
        """Whether `current_logp` has been computed, so that reading it costs nothing."""
        return "current_logp" in vars(self)

    @property
    def has_correction(self) -> bool:
        """Whether the gradients of tokens are weighted."""
        return self._correction is not None

    @cached_property
    def correction_weight(self) -> Tensor:
        """[B, T - 1] weight of each token's gradient; 1 off the actions, and without a correction.
        No gradient flows through it."""
        if self._correction is None:
            return torch.ones_like(self.token_mask)
        log_ratio = mask_values(self.proximal_logp - self.sampler_logp, self.token_mask).detach()
        return self._correction.weights(log_ratio, self.token_mask)

    @cached_property
    def entropy(self) -> Tensor:
        """[B, T - 1] entropy of the distribution of each next token, in nats."""
        if self._with_entropy:
            return self._logp_and_entropy[1]
        return self._by_sample(compute_token_entropy(self.logits, use=self._use))

    @cached_property
    def _logp_and_entropy(self) -> tuple[Tensor, Tensor]:
        logp, entropy = compute_token_logp_and_entropy(self.logits, self.input_ids, use=self._use)
        return self._by_sample(logp), self._by_sample(entropy)

    @cached_property
    def token_mask(self) -> Tensor:
        """[B, T - 1] 1.0 where the next token is an action."""
        return self._by_sample(self.action_mask[:, 1:].float())

    @cached_property
    def token_counts(self) -> Tensor:
        """[B] action tokens of each sample, at least 1."""
        return self.token_mask.sum(dim=1).clamp(min=1.0)

    @cached_property
    def log_ratio(self) -> Tensor:
        """[B, T - 1] `token_logp - old_logp`, 0 off the actions."""
        return mask_values(self.token_logp - self.old_logp, self.token_mask)

    @cached_property
    def ratio(self) -> Tensor:
        """[B, T - 1] current policy / old policy, 1 off the actions."""
        return self.log_ratio.exp()

    @property
    def weight(self) -> Tensor:
        """[B] credit."""
        if "weight" not in self.batch:
            raise KeyError("the batch has no weight; collate it with collate_saw_items")
        weight: Tensor = self.batch["weight"]
        return weight

    def logp_action(self, *, length_normalize: bool = False) -> Tensor:
        """[B] log-probability of each sample's action: the sum over its tokens, or their mean if
        `length_normalize`."""
        summed = mask_values(self.token_logp, self.token_mask).sum(dim=1)
        return summed / self.token_counts if length_normalize else summed

    def old_logp_action(self, key: str, *, length_normalize: bool = False) -> Tensor:
        """[B] the same under the old policy: `batch[key]`, the sampler's sum; with a correction the
        sum of `proximal_logp`."""
        if key not in self.batch:
            raise KeyError(f"the batch has no {key!r}; sample with ReturnSpec.for_rl() so that collation can add it")
        old: Tensor = self.batch[key]
        if self._correction is not None:
            old = mask_values(self.proximal_logp, self.token_mask).sum(dim=1)
        return old / self.token_counts if length_normalize else old

    def _logps_of(self, key: str) -> Tensor:
        """[B, T - 1] from the log-probabilities `batch[key]`, which are laid out as `input_ids`."""
        logps: Tensor = self.batch[key]
        if logps.shape != self.input_ids.shape:
            raise DataError(f"{key} {tuple(logps.shape)} must have the shape of input_ids {tuple(self.input_ids.shape)}")
        return self._by_sample(logps[:, 1:].float())

    def _by_sample(self, shifted: Tensor) -> Tensor:
        """[B, T - 1] from shifted values [rows, T - 1] or [1, S - 1], padded with 0."""
        index = self.token_index
        if index is None:
            return shifted
        return shifted.new_zeros(index.shape).index_put((index.sample, index.column), shifted.reshape(-1)[index.source])

    @cached_property
    def token_index(self) -> TokenIndex | None:
        """Where each predicted token lies; None for a padded batch with a row for each sample,
        whose shifted values are [B, T - 1] already."""
        if "turns" not in self.batch and "cu_seqlens" not in self.batch:
            return None
        # Example of TokenIndex: offset [0, 3], begin [0, 0], end [3, 2] -> first [1, 1],
        # counts [2, 1], sample [0, 0, 1], column [0, 1, 2] - [0, 2][sample] = [0, 1, 0],
        # source [0, 0, 3] + [1, 1, 1] - 1 + column = [0, 1, 3].
        offset, begin, end = self._sample_spans()
        first = begin.clamp(min=1)
        counts = (end - first).clamp(min=0)
        sample = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        column = torch.arange(len(sample), device=counts.device) - (counts.cumsum(0) - counts)[sample]
        source = (offset + first)[sample] - 1 + column
        return TokenIndex(source, sample, column, (len(counts), max(1, int(counts.max()))))

    def _sample_spans(self) -> tuple[Tensor, Tensor, Tensor]:
        """[B] of each sample: the offset of its row's shifted values in the flattened ones, and
        where its own tokens begin and end in the row.

        Example: cu_seqlens [0, 3, 5] (rows [a b c] and [d e]) gives offsets [0, 3], begins [0, 0]
        and ends [3, 2]. With turns [[0, 0, 2], [0, 2, 3], [1, 0, 2]] the row [a b c] holds two
        samples, [a b] and [c]: offsets [0, 0, 3], begins [0, 2, 0], ends [2, 3, 2].

        Token p >= 1 of a row lies at place `offset + p - 1` of the flattened shifted values. The
        offset is the row's in `cu_seqlens`; padded rows of width T have T - 1 shifted values each,
        so theirs are 0, T - 1, 2 (T - 1) and so on.
        """
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


def split_actions(values: Tensor, batch: Batch) -> list[Tensor]:
    """One [A] a sample: of per-token values [B, T - 1] those of its A action tokens. The result
    does not depend on how the batch is laid out.

    Example: values [[1, 2], [3, 0]] with mask [[0, 1], [1, 0]] give [2] and [3].
    """
    mask = SharedContext(batch["input_ids"], batch).token_mask.bool()
    return [row[actions] for row, actions in zip(values, mask, strict=True)]


def collate_actions(rows: Sequence[Tensor | None], batch: Batch) -> Tensor:
    """The inverse of `split_actions`: values of each sample's action tokens, laid out like the
    `input_ids` of `batch`; 0 elsewhere, and for a sample whose row is None.

    Example: [2] and [3] for [a b c] and [d e] padding-free, whose actions are c and e, give
    [[0, 0, 2, 0, 3]].
    """
    ids: Tensor = batch["input_ids"]
    context = SharedContext(ids, batch)
    values = torch.zeros_like(context.token_mask)
    for sample, row in enumerate(rows):
        if row is not None:
            values[sample, context.token_mask[sample].bool()] = row.to(values)
    shape = ids.shape[0], ids.shape[1] - 1
    index = context.token_index
    if index is None:
        flat = values
    else:
        flat = values.new_zeros(shape[0] * shape[1]).index_put((index.source,), values[index.sample, index.column])
    return torch.nn.functional.pad(flat.view(shape), (1, 0))
