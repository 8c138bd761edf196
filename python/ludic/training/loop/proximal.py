"""The trainer's log-probabilities at the start of a step, for corrections in later optimizer steps.

In the first optimizer step of a batch the weights are still those of the start. From the second on
(`minibatches_per_batch`, `epochs_per_batch`) the ratio of policy to sampler includes the updates
since then, and a correction must not correct for these. One more forward pass separates them from
the difference between the engines.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

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
    return replace(batch, proximal_logps=logps_by_row)
