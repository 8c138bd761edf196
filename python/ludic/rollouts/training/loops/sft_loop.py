"""Supervised fine-tuning on samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ludic.errors import ConfigError, DataError, check_value
from ludic.rollouts.training.loops.trainer_parts import LoopLog, adapt_backend, build_trainer
from ludic.rollouts.training.samples import check_sample, item_of_sample
from ludic.rollouts.training.types import Sample, SFTTrainingConfig
from ludic.training.batching.epochs import ItemBatchSource


async def run_sft_training(
    backend: Any, samples: Sequence[Sample], config: SFTTrainingConfig, metrics_logger: Any = None, *, resume: bool = False
) -> list[dict[str, float]]:
    """Take `config.num_steps` steps of `config.batch_size` samples, in passes that are each in an
    order of their own (`config.seed`). Returns the metrics of each step: `loss`, `grad_norm`, `lr`,
    `step` (steps taken), `optim_step`, and the metrics of `docs/metrics.md`.

    `backend`: a `PyTorchTrainingBackend`, or one of your own (`backends.protocol`). Checkpoints are
    written every `checkpoint_every` steps and at the end; with `resume` the run goes on from the
    newest, as if it had not stopped. `metrics_logger` gets every `log_every`-th step, and is
    finished whatever happens. Raises DataError for samples that cannot be trained on.
    """
    log = LoopLog(config, metrics_logger)
    try:
        items = [item_of_sample(sample, place=place) for place, sample in enumerate(samples)]
        for item in items:
            item.meta |= {"reward": None, "total_reward": None}  # a demonstration is not rewarded
        source = SampleSource(items, batch_size=config.batch_size, seed=config.seed, name="sft")
        trainer = build_trainer(adapt_backend(backend), source, log, resume=resume, sync_every_steps=0)
        return await log.train(trainer, source)
    finally:
        log.finish()


class SampleSource(ItemBatchSource):
    """Passes over samples."""

    def facts(self) -> dict[str, float]:
        """`epoch`, the pass of the last batch."""
        return {"epoch": float(max(0, self.batches - 1) // self.num_batches_per_epoch)}


def collate_batch(samples: Sequence[Sample], batch_size: int, step: int) -> list[Sample]:
    """The samples of a step in the order of the data, without a shuffle: from `step * batch_size`
    on, over the end as often as needed. Example: step 1 of [a b c] with 4 is [b c a b]."""
    if not samples:
        raise ConfigError("samples is empty; there is nothing to collate")
    check_value("batch_size", batch_size, least=1)
    check_value("step", step, least=0)
    return [samples[(step * batch_size + offset) % len(samples)] for offset in range(batch_size)]


def prepare_sft_batch(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """The samples concatenated, as a batch by column: `input_ids`, `labels` (the same), `loss_mask`
    and `position_ids` [1, S], and `cu_seqlens` [B + 1] int32, with which a backend keeps them
    apart. Example: samples of 3 and 2 tokens have the positions 0 1 2 0 1 and cu_seqlens 0 3 5."""
    if not samples:
        raise DataError("there are no samples to prepare a batch of")
    for place, sample in enumerate(samples):
        check_sample(sample, place)
    lengths = torch.tensor([len(sample.tokens) for sample in samples])
    ids = torch.tensor([[token for sample in samples for token in sample.tokens]])
    mask = torch.tensor([[float(value) for sample in samples for value in sample.loss_mask]])
    ends = lengths.cumsum(0)
    positions = torch.arange(ids.shape[1]) - torch.repeat_interleave(ends - lengths, lengths)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32)
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "loss_mask": mask,
        "position_ids": positions[None],
        "cu_seqlens": bounds,
    }
