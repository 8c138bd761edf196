"""The trainer's log-probabilities at the start of a step, for corrections in later optimizer steps.

In the first optimizer step of a batch the weights are still those of the start. From the second on
(`minibatches_per_batch`, `epochs_per_batch`) the ratio of policy to sampler includes the updates
since then, and a correction must not correct for these. One more forward pass separates them from
the difference between the engines.
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
from ludic.training.config import TrainerConfig
from ludic.training.loss.context import split_actions

ForwardLogps = Callable[[MicroBatch], Awaitable[Tensor]]


async def add_proximal_logps(
    batch: MacroBatch, cfg: TrainerConfig, forward: ForwardLogps, *, skip_zero_weight: bool
) -> MacroBatch:
    """The batch with the log-probabilities of every sample to train on, computed by `forward`."""
    whole = MiniBatch(batch, np.arange(len(batch.items)), cfg, skip_zero_weight=skip_zero_weight)
    logps_by_row: dict[int, Tensor] = {}
    for index, micro_batch in enumerate(whole):
        logps = await forward(micro_batch)
        rows = split_actions(logps, micro_batch.tensors)
        logps_by_row.update(zip(map(int, whole.micro_batch_rows(index)), rows, strict=False))  # padding rows belong to no sample
    if batch.share is not None:
        logps_by_row = _exchange(logps_by_row, batch, cfg.model_device)
    return replace(batch, proximal_logps=logps_by_row)


def _exchange(own: dict[int, Tensor], batch: MacroBatch, device: torch.device | str) -> dict[int, Tensor]:
    """The log-probabilities of all rows. Each rank has computed some, and later mini-batches give
    it others.

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
