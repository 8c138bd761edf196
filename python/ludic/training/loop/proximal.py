"""The trainer's own log-probabilities at the beginning of a step, for corrections that outlive the
first optimizer step.

In the first optimizer step of a batch the present weights are those of the beginning, and nothing
has to be computed twice. From the second on (`minibatches_per_batch`, `epochs_per_batch`) they are
not: the ratio of present policy to sampler then holds both what was learnt since and how far the
engines are apart, and only the second is to be corrected. One more forward pass tells them apart.
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


async def with_proximal_logps(
    batch: MacroBatch, cfg: TrainerConfig, forward: ForwardLogps, *, skip_zero_weight: bool
) -> MacroBatch:
    """The batch with the log-probabilities of every sample that will be trained, by `forward`."""
    whole = MiniBatch(batch, np.arange(len(batch.items)), cfg, skip_zero_weight=skip_zero_weight)
    found: dict[int, Tensor] = {}
    for index, micro_batch in enumerate(whole):
        logps = await forward(micro_batch)
        rows = split_actions(logps, micro_batch.tensors)
        found.update(zip(map(int, whole.rows_of(index)), rows, strict=False))  # a row that only fills up is nobody's
    return replace(batch, proximal=found)
