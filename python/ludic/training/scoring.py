"""Log-probabilities of the samples of a batch, computed before its first optimizer step: by the
policy as it is, or by a reference. They become token columns, as losses read them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from ludic.event_loop import await_if_needed
from ludic.training.backend.forward import forward_action_logprobs
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.packing import MicroBatch, Rows
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.config import TrainerConfig
from ludic.training.loop.state import TrainerState
from ludic.training.loss.actions import split_actions
from ludic.training.reference import exchange_rows
from ludic.training.types import ReferencePolicy

ForwardLogps = Callable[[MicroBatch], Awaitable[Tensor]]
"""Returns [B, T - 1] log-probabilities of a micro-batch."""


def own_forward(run: TrainerState) -> ForwardLogps:
    """Scores micro-batches with the weights as they are."""

    async def forward(micro_batch: MicroBatch) -> Tensor:
        return await run.compute(lambda backend: forward_action_logprobs(backend, micro_batch))

    return forward


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
    width: tuple[int, ...] = (),
) -> dict[int, Tensor]:
    """Row -> [A] what `forward` computes for the samples at `rows`; with `trees` it may get rows of
    prefix trees. With a `width`, `forward` returns [B, T - 1, *width]. All ranks call it. Of a
    batch that all ranks have, the result has every row, and zeros for those that were not
    computed."""
    whole = (TreeMiniBatch if trees else MiniBatch)(batch, rows, cfg, skip_zero_weight=skip_zero_weight)
    logps_by_row: dict[int, Tensor] = {}
    for index, micro_batch in enumerate(whole):
        values = split_actions(await forward(micro_batch), micro_batch.tensors)
        # Padding rows belong to no sample.
        logps_by_row.update(zip(map(int, whole.micro_batch_rows(index)), values, strict=False))
    if batch.share is not None:
        logps_by_row = exchange_rows(logps_by_row, batch, cfg.model_device, width)
    return logps_by_row


def reference_forward(run: TrainerState, reference: ReferencePolicy) -> ForwardLogps:
    """Scores micro-batches with a reference."""

    async def forward(micro_batch: MicroBatch) -> Tensor:
        # In a thread if batches are generated meanwhile, which need the event loop.
        overlaps = run.source.overlaps
        scored = await asyncio.to_thread(reference.logps, micro_batch) if overlaps else reference.logps(micro_batch)
        logps: Tensor = await await_if_needed(scored)
        return logps

    return forward
