"""Reinforcement learning on the batches of a rollout manager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import torch

from ludic.errors import ConfigTypeError, DataError
from ludic.rollouts.training.backends.columns import name_ratio_loss
from ludic.rollouts.training.backends.pytorch import PyTorchTrainingBackend
from ludic.rollouts.training.loops.trainer_parts import EnginePublisher, LoopLog, adapt_backend, build_trainer, reward_facts
from ludic.rollouts.training.rl_losses import compute_group_advantages
from ludic.rollouts.training.samples import batch_of_samples, check_sample, check_sampled_logps
from ludic.rollouts.training.types import RLTrainingConfig, RolloutBatch, Sample
from ludic.training import ranks
from ludic.training.batching.source import BatchSourceBase
from ludic.training.types import CreditAssigner, RolloutStepKey, SAWBatch
from ludic.types import Rollout, group_of


async def run_rl_training(
    backend: Any,
    data_buffer: Any,
    rollout_manager: Any,
    inference_engines: Sequence[Any] | None,
    config: RLTrainingConfig,
    metrics_logger: Any = None,
    *,
    resume: bool = False,
) -> list[dict[str, float]]:
    """Take `config.num_steps` steps, each on one batch of the manager. Returns the metrics of each
    step: `loss`, `grad_norm`, `lr`, `mean_reward`, `max_reward`, `min_reward`, `step` (steps
    taken), `optim_step`, and the metrics of `docs/metrics.md`.

    `backend`: a `PyTorchTrainingBackend`, or one of your own. Rewards come from the manager's
    `reward_fn`, else from the sample, else they are 1 for `metadata["correct"]`. Every `sync_every`
    steps and at the end the weights are written to a folder that all engines load
    (`EnginePublisher`); without engines nothing is written, and the manager is told the version
    after each step. A server that was restarted gets the weights again before the next batch. An
    engine may also be a `PolicyPublisher`, which gets tensors. With a `max_lag` of the manager
    above 0, samples are taken while the trainer steps: a `generate_fn` that samples in this process
    needs weights of its own then, not the weights of `backend`, or `generate_while_training=False`.

    Checkpoints, every `checkpoint_every` steps and at the end, hold the state of the manager and
    its buffer; with `resume` the run goes on from the newest. The manager is entered unless it is
    already; with several ranks, the manager of rank 0 generates for all. `metrics_logger` gets
    every `log_every`-th step, and is finished whatever happens.
    """
    log = LoopLog(config, metrics_logger)
    try:
        if rollout_manager.data_buffer is not data_buffer:
            raise ConfigTypeError("data_buffer is not rollout_manager's; pass the buffer that the manager was made with")
        credit = AdvantageCredit(config)
        trained = adapt_backend(backend)
        publisher = EnginePublisher(trained, inference_engines or (), rollout_manager)
        ratio_loss = name_ratio_loss(backend.algo.loss) if isinstance(backend, PyTorchTrainingBackend) else None
        source = ManagerSource(rollout_manager, credit, publisher, ratio_loss)
        trainer = build_trainer(
            trained,
            source,
            log,
            publisher=publisher,
            credit=credit,
            resume=resume,
            sync_every_steps=config.sync_every if inference_engines else 1,  # samples are of the weights in this process
            epochs_per_batch=config.epochs_per_batch,
            minibatches_per_batch=config.minibatches_per_batch,
        )
        rollout_manager.limit(max(0, config.num_steps - trainer.current_step))
        async with AsyncExitStack() as stack:
            if ranks.rank() == 0 and not rollout_manager.is_entered:
                await stack.enter_async_context(rollout_manager)
            return await log.train(trainer, source)
    finally:
        log.finish()


class ManagerSource(BatchSourceBase):
    """The batches of an `AsyncRolloutManager`, with their credit. Engines of `publisher` that were
    restarted get their weights before each batch. `ratio_loss` names the loss if it needs the
    log-probabilities of the sampled tokens."""

    shards_across_ranks = False

    def __init__(self, manager: Any, credit: CreditAssigner, publisher: EnginePublisher, ratio_loss: str | None = None) -> None:
        self.manager, self._credit, self._publisher, self._ratio_loss = manager, credit, publisher, ratio_loss
        self._rewards: list[float] = []

    @property
    def max_lag(self) -> int:  # type: ignore[override]  # the manager's
        return int(self.manager.max_lag)

    @property
    def overlaps(self) -> bool:  # type: ignore[override]
        return self.manager.config.generate_while_training and self.max_lag > 0

    async def next_batch(self) -> SAWBatch:
        await self._publisher.sync_returned()
        reward_fn = compute_own_reward if self.manager.config.reward_fn is None else None
        batch: RolloutBatch = await self.manager.generate_batch(reward_fn)
        self._rewards = [sample.reward for sample in batch.samples]
        if self._ratio_loss is not None:
            check_sampled_logps(batch.samples, self._ratio_loss)
        return batch_of_samples(batch.samples, self._credit)

    def facts(self) -> dict[str, float]:
        """The rewards of the last batch."""
        return reward_facts(self._rewards)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.manager.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.manager.load_state_dict(state)


@dataclass
class AdvantageCredit:
    """`advantage` of `RLTrainingConfig`: relative to the mean of the group where a group has more
    than one member, else reward - baseline."""

    config: RLTrainingConfig

    def compute(self, rollouts: Sequence[Rollout]) -> dict[RolloutStepKey, float]:
        groups = [group_of(rollout.meta) for rollout in rollouts]
        rewards = [rollout.total_reward for rollout in rollouts]
        advantages = advantages_of(rewards, groups, self.config)
        return {(rollout.id, 0): advantage for rollout, advantage in zip(rollouts, advantages, strict=True)}


def advantages_of(rewards: Sequence[float], groups: Sequence[Any], config: RLTrainingConfig) -> list[float]:
    """[B] advantages. Example: rewards [1, 0, 3] of groups [a, a, b] with baseline 0 are
    [0.5, -0.5, 3] with `auto`, and [1, 0, 3] with `baseline`."""
    if config.advantage == "baseline":
        return compute_advantages(rewards, config.baseline)
    sizes = Counter(group for group in groups if group is not None)
    relative = compute_group_advantages(rewards, groups)
    return [
        advantage if sizes[group] > 1 else reward - config.baseline
        for reward, group, advantage in zip(rewards, groups, relative, strict=True)
    ]


def compute_reward(sample: Sample) -> float:
    """1 if `metadata["correct"]` is true, else 0."""
    return 1.0 if sample.metadata.get("correct") else 0.0


def compute_own_reward(sample: Sample) -> float:
    """The reward that the sample has, be it 0; one without gets `compute_reward`."""
    return sample.reward if sample.has_reward else compute_reward(sample)


def compute_advantages(rewards: Sequence[float], baseline: float = 0.0) -> list[float]:
    """reward - baseline. Example: [1, 0] with baseline 0.5 are [0.5, -0.5]."""
    return [float(reward) - baseline for reward in rewards]


def prepare_grpo_batch(batch: RolloutBatch, rewards: Sequence[float], config: RLTrainingConfig) -> dict[str, torch.Tensor]:
    """The batch by column, padded on the right: `input_ids`, `labels` (the same), `attention_mask`
    and `loss_mask` [B, T], `advantages` [B], and `old_log_probs` [B, T] if all samples have
    them."""
    if not len(batch.tokens) == len(batch.loss_masks) == len(rewards) > 0:
        raise DataError(
            f"rows ({len(batch.tokens)}), masks ({len(batch.loss_masks)}) and rewards ({len(rewards)}) must be equally many, not 0"
        )
    samples = batch.samples or [
        Sample("", tokens=row, loss_mask=mask) for row, mask in zip(batch.tokens, batch.loss_masks, strict=True)
    ]
    for place, sample in enumerate(samples):
        check_sample(sample, place)
    advantages = advantages_of(list(rewards), [sample.group_index for sample in samples], config)
    columns = {
        "input_ids": _pad(batch.tokens, torch.int64),
        "attention_mask": _pad([[1] * len(row) for row in batch.tokens], torch.int64),
        "loss_mask": _pad(batch.loss_masks, torch.float32),
        "advantages": torch.tensor(advantages, dtype=torch.float32),
    }
    logps = [sample.rollout_log_probs for sample in samples]
    known = [row for row in logps if row is not None]
    if len(known) == len(logps):
        columns["old_log_probs"] = _pad(known, torch.float32)
    return {**columns, "labels": columns["input_ids"].clone()}


def _pad(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)
