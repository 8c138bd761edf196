"""Losses of InfoSeed: the seed that was named in the prompt can be told from the completion.

A sample's representation h is pooled from the last hidden states of its *completion* tokens. A
sample has one of the seeds 1..num_seeds, or none. Both losses read these columns of a batch:
`hidden` [rows, T, D], in the layout of `input_ids`; `seed_id` [B], below 1 for a sample without a
seed; and, where the mini-batch is divided, `position` [B], the sample's index in it.

Shapes: B samples of the micro-batch, N of the mini-batch, D width of the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ludic.errors import check_value
from ludic.training.loss.base import ActionLoss
from ludic.training.loss.batch import Batch, Stats, read_column
from ludic.training.loss.context import SharedContext

Pooling = Literal["mean", "last"]

HIDDEN, SEED_ID, POSITION = "hidden", "seed_id", "position"
"""Columns of a batch."""
POOLED, IDS, SEEDED = "seed_pooled", "seed_ids", "seed_count"
"""What the first pass measures: [N, D] representations, [N] seeds; the number of seeded samples."""
MIN_TEMPERATURE = 1e-4


def pool_completions(batch: Batch, pooling: Pooling = "mean") -> Tensor:
    """[B, D] float32 mean of the hidden states of each sample's completion tokens, or the last of
    them. Zeros for a sample without completion tokens.

    Example: states [p, a, b, pad] with action mask [0, 1, 1, 0] have mean (a + b) / 2 and last b.
    """
    hidden = read_column(batch, HIDDEN, "train with a loss that has reads_hidden")
    shared = SharedContext(batch["input_ids"], batch)
    mask, index = shared.token_mask, shared.token_index
    if index is None:
        sample, column = mask.nonzero(as_tuple=True)
        source = sample * mask.shape[1] + column
    else:
        acts = mask[index.sample, index.column] > 0
        source, sample, column = index.source[acts], index.sample[acts], index.column[acts]
    if pooling == "last":
        last = column.new_full((mask.shape[0],), -1).scatter_reduce(0, sample, column, "amax")
        keep = column == last[sample]
        source, sample, column = source[keep], sample[keep], column[keep]
        weight = torch.ones_like(column, dtype=torch.float32)
    else:
        weight = mask[sample, column] / mask.sum(dim=1)[sample]
    states = hidden[:, 1:].reshape(-1, hidden.shape[-1])[source].float()
    return states.new_zeros(mask.shape[0], hidden.shape[-1]).index_add(0, sample, states * weight[:, None])


def contrast_seeds(pooled: Tensor, seed_ids: Tensor, temperature: float) -> Tensor:
    """InfoNCE (arXiv:1807.03748, eq. 4) of the rows with a seed: the mean over ordered pairs (i, j)
    of one seed of -log softmax_i(sim)_ij, where sim = x x^T / max(temperature, 1e-4) without its
    diagonal and x = h / |h|. Zero if no seed has two rows.

    pooled: [N, D]; seed_ids: [N].
    """
    rows = seed_ids >= 1
    x, ids = F.normalize(pooled[rows], dim=1), seed_ids[rows]
    own = torch.eye(len(ids), dtype=torch.bool, device=ids.device)
    positive = (ids[:, None] == ids[None, :]) & ~own
    if not positive.any():
        return pooled.sum() * 0.0
    similarity = x @ x.T / max(temperature, MIN_TEMPERATURE)
    return -F.log_softmax(similarity.masked_fill(own, float("-inf")), dim=1)[positive].mean()


def seed_stats(pooled: Tensor, seed_ids: Tensor) -> Stats:
    """`pred_acc`, the share of the rows with a seed whose seed has the nearest mean direction, the
    row's own left out; `diversity_l2`, the mean distance between the means of two seeds. Empty for
    fewer than two seeds. `training.info_seed.seed_metrics` computes the same outside of training.

    pooled: [N, D]; seed_ids: [N], below 1 for a row without a seed.
    """
    rows = seed_ids >= 1
    states, (seeds, index) = pooled[rows].detach(), torch.unique(seed_ids[rows], return_inverse=True)
    if len(seeds) < 2:
        return {}
    x, own = F.normalize(states, dim=1), F.one_hot(index, len(seeds)).to(states.dtype)
    others = (own.T @ x)[None] - own[:, :, None] * x[:, None]
    cosines = F.cosine_similarity(x[:, None], others, dim=2).masked_fill(own.sum(dim=0)[None] == own, float("-inf"))
    means = own.T @ states / own.sum(dim=0)[:, None]
    return {
        "pred_acc": (cosines.argmax(dim=1) == index).to(states.dtype).mean(),
        "diversity_l2": torch.pdist(means).mean(),
    }


class SeedLoss(ActionLoss):
    """What both losses share. `coeff` is the factor of the loss."""

    scales_itself = True
    reads_hidden = True
    needs_first_pass = True
    coeff: float
    pooling: Pooling

    def __post_init__(self) -> None:
        check_value("coeff", self.coeff, least=0)
        check_value("pooling", self.pooling, choices=get_args(Pooling))


@dataclass
class SeedContrastiveLoss(SeedLoss):
    """coeff L, with L the InfoNCE of the mini-batch's seeded samples (`contrast_seeds`).

    Pairs cross micro-batches. So a first pass gathers all representations without gradient, and
    each micro-batch then has the gradient of sum_i sg(dL/dh_i) h_i over its own samples: any split
    has the gradient of the whole. L itself is reported by shares.
    """

    coeff: float = 0.01
    temperature: float = 0.1
    pooling: Pooling = "mean"

    gathers = (POOLED, IDS)
    """What `first_pass` returns with a row for each sample."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_value("temperature", self.temperature, above=0)

    def first_pass(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """[B, D] representations and [B] seeds of the micro-batch."""
        pooled = pool_completions(batch, self.pooling)
        return {POOLED: pooled, IDS: _seeds(batch, pooled).to(pooled.dtype)}

    def compute(self, logits: Tensor, batch: Batch, *, shared: SharedContext | None = None) -> tuple[Tensor, Stats]:
        pooled = pool_completions(batch, self.pooling)
        measured = {} if shared is None else shared.totals.measured
        if POOLED not in measured:
            everyone, ids = pooled, _seeds(batch, pooled)
            whole = contrast_seeds(pooled, ids, self.temperature)
            value = self.coeff * whole
        else:
            ids = measured[IDS]
            with torch.enable_grad():
                everyone = measured[POOLED].detach().requires_grad_()
                whole = contrast_seeds(everyone, ids, self.temperature)
                [gradient] = torch.autograd.grad(whole, everyone)
            own = (gradient[batch[POSITION]] * pooled).sum()
            trained = (SharedContext(batch["input_ids"], batch).token_mask.sum(dim=1) > 0).sum()
            value = self.coeff * (own - own.detach() + whole.detach() * trained / len(everyone))
        return value, {"loss": value.detach(), "info_nce": whole.detach(), **seed_stats(everyone, ids)}


@cache
def seed_directions(num_seeds: int, width: int) -> Tensor:
    """[num_seeds, width] orthonormal rows, float64 on the CPU. Raises ConfigError for more seeds
    than dimensions."""
    check_value("num_seeds", num_seeds, "with loss='ce' the width of the model bounds it", most=width)
    drawn = torch.randn(width, num_seeds, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.linalg.qr(drawn)[0].T


class FixedSeedHead(nn.Module):
    """[B, D] representations -> [B, num_seeds] cosines with fixed directions, over `temperature`.

    A classifier that is not trained does as well as one that is (Hoffer et al. 2018,
    arXiv:1801.04540), and is no part of the model, its optimizer or its checkpoints. The directions
    depend on `num_seeds` and D alone; they are orthogonal.
    """

    def __init__(self, num_seeds: int, temperature: float) -> None:
        super().__init__()
        self.num_seeds, self.temperature = num_seeds, temperature

    def forward(self, pooled: Tensor) -> Tensor:
        rows = seed_directions(self.num_seeds, pooled.shape[1]).to(pooled)
        return F.normalize(pooled, dim=1) @ rows.T / max(self.temperature, MIN_TEMPERATURE)


@dataclass(eq=False)
class SeedClassificationLoss(SeedLoss):
    """coeff L, with L the mean over the mini-batch's seeded samples of the cross-entropy of
    `head`(h) against class seed - 1.

    `head` maps [B, D] to [B, num_seeds]; the optimizer must have its parameters.
    """

    head: nn.Module
    coeff: float = 0.01
    pooling: Pooling = "mean"

    def first_pass(self, logits: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The number of seeded samples."""
        return {SEEDED: (_seeds(batch, logits) >= 1).sum()}

    def compute(self, logits: Tensor, batch: Batch, *, shared: SharedContext | None = None) -> tuple[Tensor, Stats]:
        pooled = pool_completions(batch, self.pooling)
        seeds = _seeds(batch, pooled)
        seeded = seeds >= 1
        scores = self.head(pooled).float()
        measured = {} if shared is None else shared.totals.measured
        count = measured[SEEDED] if SEEDED in measured else seeded.sum()
        classes = (seeds.clamp(min=1) - 1).long()
        losses = F.cross_entropy(scores, classes, reduction="none")
        value = self.coeff * (losses * seeded).sum() / count.clamp(min=1)
        right = ((scores.detach().argmax(dim=1) == classes) & seeded).sum()
        share = 1.0 if shared is None else shared.mini_batch_share("samples")  # by which the parts are weighted
        return value, {"loss": value.detach(), "pred_acc": right / (count.clamp(min=1) * share)}


def _seeds(batch: Batch, like: Tensor) -> Tensor:
    """[B] seed of each sample; 0 for one without completion tokens, which is no sample."""
    seeds = read_column(batch, SEED_ID, "expand its requests with SeedPrompts").to(like.device)
    trained = SharedContext(batch["input_ids"], batch).token_mask.sum(dim=1) > 0
    return torch.where(trained, seeds, torch.zeros_like(seeds))
