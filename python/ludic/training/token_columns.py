"""Log-probabilities of a macro-batch under another policy than the one that is trained: one forward
pass over all samples before the batch is divided, and each token keeps its value in any layout.

- `proximal_logps`: under the weights at the start of the step. In the first optimizer step of a
  batch these are the current ones. From the second on (`minibatches_per_batch`,
  `epochs_per_batch`) the ratio of policy to sampler includes the updates since then, and a
  correction must not correct for these.
- `reference_logps`: under a reference that does not change during training.
- `actor_logps`: the sampled ones, where some are replaced (`RLAlgorithm.rescores`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ludic.training import ranks
from ludic.training.batching.micro_batching import MicroBatch
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.packing import Rows
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.config import TrainerConfig
from ludic.training.loss.context import split_actions

ForwardLogps = Callable[[MicroBatch], Awaitable[Tensor]]
"""Returns [B, T - 1] log-probabilities of a micro-batch."""


async def add_token_column(
    batch: MacroBatch, name: str, cfg: TrainerConfig, forward: ForwardLogps, *, skip_zero_weight: bool, trees: bool
) -> MacroBatch:
    """The batch with the token column `name`: what `forward` computes for every sample, or with
    `skip_zero_weight` for samples whose weight is not 0."""
    rows = np.arange(len(batch.items))
    scored = await score_rows(batch, rows, cfg, forward, skip_zero_weight=skip_zero_weight, trees=trees)
    return replace(batch, token_columns={**batch.token_columns, name: scored})


async def score_rows(
    batch: MacroBatch,
    rows: Rows,
    cfg: TrainerConfig,
    forward: ForwardLogps,
    *,
    skip_zero_weight: bool = False,
    trees: bool = False,
) -> dict[int, Tensor]:
    """Row -> [A] what `forward` computes for the samples at `rows`; with `trees` it may get rows of
    prefix trees. All ranks call it. Of a batch that all ranks have, the result has every row, and
    zeros for those that were not computed."""
    whole = (TreeMiniBatch if trees else MiniBatch)(batch, rows, cfg, skip_zero_weight=skip_zero_weight)
    logps_by_row: dict[int, Tensor] = {}
    for index, micro_batch in enumerate(whole):
        logps = await forward(micro_batch)
        values = split_actions(logps, micro_batch.tensors)
        logps_by_row.update(
            zip(map(int, whole.micro_batch_rows(index)), values, strict=False)
        )  # padding rows belong to no sample
    if batch.share is not None:
        logps_by_row = exchange_rows(logps_by_row, batch, cfg.model_device)
    return logps_by_row


def exchange_rows(own: dict[int, Tensor], batch: MacroBatch, device: torch.device | str) -> dict[int, Tensor]:
    """Row -> [A] values of all rows of a batch that all ranks have. Each rank has computed some,
    and later mini-batches give it others.

    Example: 3 rows of 2, 1 and 2 tokens, of which rank 0 has the first and rank 1 the others:
    [a b 0 0 0] + [0 0 c d e] = [a b c d e] is divided at 2 and 3.
    """
    counts = batch.table.target_counts.tolist()
    ends = list(accumulate(counts))
    column = torch.zeros(sum(counts), device=device)
    for row, logps in own.items():
        column[ends[row] - counts[row] : ends[row]] = logps.to(column)
    if ranks.is_distributed():
        dist.all_reduce(column)
    return dict(enumerate(column.split(counts)))
