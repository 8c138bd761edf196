"""The quantities that all losses on one micro-batch share: log-probabilities, masks, weights,
ratios.

A token has up to five log-probabilities, which all modules call by these names ([B, T - 1] each):

- `sampler_logp`: under the policy that sampled the token, as the sampler reported it
  (`actor_logps` in batches and samples). Papers call this the behaviour policy.
- `proximal_logp`: under the trainer's weights at the start of the step. It differs from
  `sampler_logp` if another engine or older weights sampled the token.
- `old_logp`: the denominator of ratios, pi_old in the formulas: `sampler_logp`, or with a
  correction `proximal_logp`.
- `reference_logp`: under a reference that does not change during training, if a loss reads one
  (`training.reference`).
- `current_logp`: under the current model, with gradient, pi in the formulas. `token_logp` has the
  same values; with a correction, the gradient of each token is multiplied by a weight.

`logp_action` and `old_logp_action` are sums, or means, over the action tokens of a sample.

Shapes: B samples, T tokens of the longest sample. A padded batch is [rows, T], a padding-free batch
[1, S], and several samples may share a row. Only this module handles these layouts: a tensor
described as [B, T - 1] below always has one row per sample.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ludic.errors import DataError
from ludic.training.loss.batch import (
    CANDIDATES,
    Batch,
    BatchTotals,
    Correction,
    Normalizer,
    num_pairs,
    num_rows,
    num_targets,
    read_column,
)
from ludic.training.loss.logprobs import (
    LogitsUse,
    compute_among_candidates,
    compute_token_entropy,
    compute_token_logp,
    compute_token_logp_and_entropy,
    mask_values,
    scale_gradient,
    weigh_values,
)
from ludic.training.loss.token_scores import TOKEN_SCORES, TokenScores
from ludic.training.types import TOKEN_WEIGHT

SAMPLE_LOGPS = "sample with ReturnSpec.for_rl() or set Sample.rollout_log_probs"
"""How a batch gets the sampler's log-probabilities."""


class TokenIndex(NamedTuple):
    """Positions of the N predicted tokens of all samples, sample after sample.

    "Shifted" values are the values of a batch without its first column, [rows, T - 1] or
    [1, S - 1]: column t belongs to token t + 1. The first token of a row has no prediction.

    Example: [a b c] and [d e] padding-free are [a b c d e]; the shifted values are [b c d e]:

        source   0  1  3      b, c, e; index 2 is d, the first token of its row
        sample   0  0  1
        column   0  1  0
        shape    (2, 2)       b c
                              e 0
    """

    source: Tensor
    """[N] index into the flattened shifted values."""
    sample: Tensor
    """[N] row in the result."""
    column: Tensor
    """[N] column in the result."""
    shape: tuple[int, int]
    """Shape of the result: (B, largest number of predicted tokens of a sample)."""


class SharedContext:
    """Quantities of one micro-batch. Each is computed when a loss first reads it."""

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
        """`totals`: totals of the mini-batch. `consume_logits`: nothing else reads the logits, so
        the backward pass may overwrite them. `wide`: compute in float32 for logits of any dtype.
        `with_entropy`: a loss will read the entropy. `temperature`: the policy is
        softmax(logits / temperature). `correction`: weights the gradient of each token by the
        difference between trainer and sampler. If the batch has `token_scores`, they decide on
        the temperature, and no logit is read."""
        self.logits = logits
        self.batch = batch
        self._totals = totals
        self._use = LogitsUse(consume=consume_logits, wide=wide, temperature=temperature)
        self._with_entropy = with_entropy
        self._correction = correction

    @cached_property
    def totals(self) -> BatchTotals:
        """Totals of the mini-batch; without one, of this batch."""
        return BatchTotals.from_batch(self.batch) if self._totals is None else self._totals

    def mini_batch_share(self, normalizer: Normalizer) -> float | Tensor:
        """Return this batch's fraction of the mini-batch, in [0, 1], counted in `normalizer`; 1
        without a mini-batch. For tokens it is a scalar on the device."""
        if self._totals is None:
            return 1.0
        total = self._totals.denominator(normalizer)
        if total <= 0:
            return 0.0
        if normalizer == "tokens":
            return (num_targets(self.batch) / total).float()
        return (num_rows(self.batch) if normalizer == "samples" else num_pairs(self.batch)) / total

    @property
    def temperature(self) -> float:
        """The policy is softmax(logits / temperature)."""
        return self._use.temperature

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
        """[B, T - 1] log-probability of each next token under the current model. With a correction,
        its gradient (not its value) is multiplied by `correction_weight`, for every loss."""
        if self._correction is None:
            return self.current_logp
        return scale_gradient(self.current_logp, self.correction_weight)

    @cached_property
    def current_logp(self) -> Tensor:
        """[B, T - 1] log-probability of each next token under the current model, without a
        correction."""
        if CANDIDATES in self.batch:
            return self._among_candidates[0]
        if self._scores is not None:
            return self.by_sample(self._scores.logp)
        if self._with_entropy:
            return self._logp_and_entropy[0]
        return self.by_sample(compute_token_logp(self.logits, self.input_ids, use=self._use))

    @cached_property
    def _among_candidates(self) -> tuple[Tensor, Tensor]:
        """[B, T - 1] log-probability and entropy of each next token in softmax over its
        candidates."""
        if self._scores is not None:
            raise DataError("samples with candidates need whole logits; set trainer.logits=full and trainer.prefix_sharing=off")
        both = compute_among_candidates(self.logits, self.input_ids, self.batch[CANDIDATES], temperature=self.temperature)
        return self.by_sample(both[0]), self.by_sample(both[1])

    @cached_property
    def sampler_logp(self) -> Tensor:
        """[B, T - 1] log-probability of each next token as the sampler reported it."""
        return self.read_logps("actor_logps", SAMPLE_LOGPS)

    @cached_property
    def proximal_logp(self) -> Tensor:
        """[B, T - 1] log-probability of each next token under the trainer's weights at the start of
        the step: the batch's `proximal_logps`, or else `current_logp`, which is equal in the first
        optimizer step of a batch."""
        return self.read_logps("proximal_logps") if "proximal_logps" in self.batch else self.current_logp.detach()

    @cached_property
    def reference_logp(self) -> Tensor:
        """[B, T - 1] log-probability of each next token under the reference, without gradient. Only
        action tokens have a meaningful value."""
        return self.read_logps("reference_logps", "pass reference= to Trainer, such as FrozenModel(model, cfg)")

    @cached_property
    def old_logp(self) -> Tensor:
        """[B, T - 1] log-probability of each next token under the old policy, the denominator of
        ratios."""
        return self.sampler_logp if self._correction is None else self.proximal_logp

    @property
    def actor_logps_shifted(self) -> Tensor:
        """Alias of `old_logp` from earlier versions."""
        return self.old_logp

    @property
    def has_computed_logp(self) -> bool:
        """Whether `current_logp` has already been computed."""
        return "current_logp" in vars(self)

    @property
    def has_correction(self) -> bool:
        """Whether a correction weights the gradients of tokens."""
        return self._correction is not None

    @cached_property
    def correction_weight(self) -> Tensor:
        """[B, T - 1] weight of each token's gradient, without gradient itself. It is 1 outside the
        action tokens, and 1 everywhere without a correction."""
        if self._correction is None:
            return torch.ones_like(self.token_mask)
        log_ratio = mask_values(self.proximal_logp - self.sampler_logp, self.token_mask).detach()
        more = {"shared": self} if getattr(self._correction, "reads_shared", False) else {}
        return self._correction.weights(log_ratio, self.token_mask, **more)

    @cached_property
    def entropy(self) -> Tensor:
        """[B, T - 1] entropy of the distribution of each next token, in nats."""
        if CANDIDATES in self.batch:
            return self._among_candidates[1]
        if self._scores is not None:
            return self.by_sample(self._scores.entropy)
        if self._with_entropy:
            return self._logp_and_entropy[1]
        return self.by_sample(compute_token_entropy(self.logits, use=self._use))

    @property
    def _scores(self) -> TokenScores | None:
        """What log-probabilities are computed from if the model computed no logits."""
        scores: TokenScores | None = self.batch.get(TOKEN_SCORES)
        return scores

    def zero(self) -> Tensor:
        """[] float32 0, with gradient 0 for all parameters."""
        values = self.logits if self._scores is None else self.current_logp
        return values.to(torch.promote_types(values.dtype, torch.float32)).sum() * 0.0

    @cached_property
    def _logp_and_entropy(self) -> tuple[Tensor, Tensor]:
        logp, entropy = compute_token_logp_and_entropy(self.logits, self.input_ids, use=self._use)
        return self.by_sample(logp), self.by_sample(entropy)

    @cached_property
    def token_mask(self) -> Tensor:
        """[B, T - 1] 1.0 where the next token is an action token, else 0.0. A fraction counts the
        token in part."""
        return self.by_sample(self.action_mask[:, 1:].float())

    @cached_property
    def token_counts(self) -> Tensor:
        """[B] number of predicted action tokens of each sample, but at least 1."""
        return self.token_mask.sum(dim=1).clamp(min=1.0)

    @cached_property
    def log_ratio(self) -> Tensor:
        """[B, T - 1] `token_logp - old_logp`; 0 outside the action tokens."""
        return mask_values(self.token_logp - self.old_logp, self.token_mask)

    @cached_property
    def ratio(self) -> Tensor:
        """[B, T - 1] current policy / old policy; 1 outside the action tokens."""
        return self.log_ratio.exp()

    @property
    def mean_weight(self) -> Tensor:
        """[B] weight (credit) of each sample, of token weights their mean: for statistics."""
        return read_column(self.batch, "weight", "collate it with collate_saw_items")

    @property
    def weight(self) -> Tensor:
        """[B] weight (credit) of each sample, for losses that weigh whole answers. Raises DataError
        if the tokens of the batch have weights of their own."""
        if TOKEN_WEIGHT in self.batch:
            raise DataError(
                f"the batch has {TOKEN_WEIGHT}, credit for each token, but this loss weighs whole answers; "
                "use a loss per token, such as TokenClippedSurrogateLoss, or a credit assigner of one number a step"
            )
        return self.mean_weight

    @cached_property
    def token_weight(self) -> Tensor:
        """[B, T - 1] weight (credit) of each next token: the batch's `token_weight`, which has the
        layout of `input_ids`; without one [B, 1], the weight of the sample."""
        if TOKEN_WEIGHT not in self.batch:
            return self.weight[:, None]
        weight: Tensor = self.batch[TOKEN_WEIGHT]
        return self.by_sample(weight[:, 1:])

    def values(self, *, after: bool = False) -> Tensor:
        """[B, T - 1] value that a critic, a model with one output for each token, has before each
        next token; `after`: after it."""
        outputs = self.logits[..., 0]
        return self.by_sample((outputs[:, 1:] if after else outputs[:, :-1]).float())

    def sample_column(self, name: str) -> Tensor:
        """[B] column that the algorithm's batch credit computed for the samples. Raises
        DataKeyError if it did not."""
        return read_column(self.batch, name, "set batch_credit= of the RLAlgorithm to ListwiseCredit")

    def logp_action(self, *, length_normalize: bool = False) -> Tensor:
        """[B] log-probability of each sample's action under the current model: the sum over its
        tokens, or with `length_normalize` the mean."""
        summed = weigh_values(self.token_logp, self.token_mask).sum(dim=1)
        return summed / self.token_counts if length_normalize else summed

    def old_logp_action(self, key: str, *, length_normalize: bool = False) -> Tensor:
        """[B] the same under the old policy: `batch[key]`, the sum of the sampled
        log-probabilities; with a correction the sum of `proximal_logp`."""
        old = read_column(self.batch, key, SAMPLE_LOGPS)
        if self._correction is not None:
            old = weigh_values(self.proximal_logp, self.token_mask).sum(dim=1)
        return old / self.token_counts if length_normalize else old

    def read_logps(self, key: str, remedy: str = "") -> Tensor:
        """[B, T - 1] log-probabilities from `batch[key]`, which has the layout of `input_ids`: a
        loss reads columns of its own with it. Without the column it raises DataKeyError, which ends
        with the `remedy`."""
        logps = read_column(self.batch, key, remedy)
        if logps.shape != self.input_ids.shape:
            raise DataError(f"{key} {tuple(logps.shape)} must have the shape of input_ids {tuple(self.input_ids.shape)}")
        return self.by_sample(logps[:, 1:].float())

    def by_sample(self, shifted: Tensor) -> Tensor:
        """Arrange shifted values, [rows, T - 1] or [1, S - 1], as [B, T - 1], padded with 0."""
        index = self.token_index
        if index is None:
            return shifted
        return shifted.new_zeros(index.shape).index_put((index.sample, index.column), shifted.reshape(-1)[index.source])

    @cached_property
    def token_index(self) -> TokenIndex | None:
        """Positions of the predicted tokens. None for a padded batch with one row per sample: its
        shifted values already are [B, T - 1]."""
        if "turns" not in self.batch and "cu_seqlens" not in self.batch:
            return None
        # The example of TokenIndex, [a b c] and [d e]: offset [0, 3], begin [0, 0], end [3, 2]
        # give first [1, 1], counts [2, 1], sample [0, 0, 1],
        # column [0, 1, 2] - [0, 2][sample] = [0, 1, 0],
        # source [0, 0, 3] + [1, 1, 1] - 1 + column = [0, 1, 3].
        offset, begin, end = self._sample_spans()
        first = begin.clamp(min=1)
        counts = (end - first).clamp(min=0)
        sample = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        column = torch.arange(len(sample), device=counts.device) - (counts.cumsum(0) - counts)[sample]
        source = (offset + first)[sample] - 1 + column
        return TokenIndex(source, sample, column, (len(counts), max(1, int(counts.max()))))

    def _sample_spans(self) -> tuple[Tensor, Tensor, Tensor]:
        """Three [B] tensors: for each sample the offset of its row in the flattened shifted values,
        and the start and end of its own tokens in the row.

        Token p >= 1 of a row is at index `offset + p - 1` of the flattened shifted values. In a
        padding-free batch the offset is the entry of `cu_seqlens`. Padded rows of width T have
        T - 1 shifted values each, so their offsets are 0, T - 1, 2 (T - 1) and so on.

        Example: cu_seqlens [0, 3, 5] (rows [a b c] and [d e]) gives offsets [0, 3], begins [0, 0]
        and ends [3, 2]; c is token 2 of its row, at index 0 + 2 - 1 = 1 of [b c d e]. With turns
        [[0, 0, 2], [0, 2, 3], [1, 0, 2]] the row [a b c] has two samples, [a b] and [c]: offsets
        [0, 0, 3], begins [0, 2, 0], ends [2, 3, 2].
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
