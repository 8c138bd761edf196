"""Compares the trainer's log-probabilities of samples with the sampler's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ludic.columns import array_mean_or_zero
from ludic.training.backend.forward import forward_action_logprobs
from ludic.training.backend.protocol import TrainingBackend
from ludic.training.batching.packing import MicroBatch, collate_saw_items
from ludic.training.config import TrainerConfig
from ludic.training.types import SAWItem

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """Log-probabilities of the same action tokens from sampler and trainer; one array per sample.

    Example: ids [a b c] with action mask [0, 1, 1] have `positions` [1, 2] and
    `all_trainer_logps` of b and c, at indices 1 - 1 = 0 and 2 - 1 = 1.
    """

    items: list[SAWItem]
    positions: list[NDArray[np.int64]]
    """Positions of the compared tokens in the ids of each sample. Never 0: the first token has no
    prediction."""
    sampler_logps: list[Floats]
    trainer_logps: list[Floats]
    all_trainer_logps: list[Floats]
    """The trainer's log-probabilities of all tokens of a sample except the first; 0 for those that
    are neither actions nor next to one."""

    @cached_property
    def differences(self) -> list[Floats]:
        """Infinite where a log-probability is NaN."""
        pairs = zip(self.trainer_logps, self.sampler_logps, strict=True)
        return [_nan_to_infinity(trainer_logps - sampler_logps) for trainer_logps, sampler_logps in pairs]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.positions))

    @property
    def mean(self) -> float:
        """Mean absolute difference, in nats; infinite if the trainer gives a token probability 0,
        or if a log-probability is NaN."""
        return mean_absolute(self.differences)

    @property
    def max(self) -> float:
        return max((float(np.abs(part).max()) for part in self.differences if len(part)), default=0.0)

    def worst(self, count: int) -> list[tuple[int, int]]:
        """Return (sample, index of the compared token) of the `count` largest differences, largest
        first."""
        ordered = sorted(
            ((float(abs(value)), i, j) for i, part in enumerate(self.differences) for j, value in enumerate(part)), reverse=True
        )
        return [(i, j) for _, i, j in ordered[:count]]


async def compare(
    backend: TrainingBackend,
    cfg: TrainerConfig,
    items: Sequence[SAWItem],
    *,
    temperature: float | None = None,
    top_p: float = 1.0,
) -> Comparison:
    """Compute the trainer's log-probabilities of the samples' actions and of the tokens next to
    them, in one forward pass. `temperature` and `top_p` as in `forward_logprobs`."""
    tensors = collate_saw_items(items, pad_token_id=cfg.pad_token_id, device=cfg.model_device)
    # 1 at actions and at the tokens before and after them: [0, 0, 1, 0, 0] gives [0, 1, 1, 1, 0].
    mask = (tensors["action_mask"] != 0).float()[:, None]
    tensors["action_mask"] = torch.nn.functional.max_pool1d(mask, 3, stride=1, padding=1)[:, 0]
    batch = MicroBatch(tensors, len(items))
    logps = await forward_action_logprobs(backend, batch, temperature=temperature, top_p=top_p).result()
    table = logps.double().cpu().numpy()
    rows = [table[i, : len(item.input_ids) - 1] for i, item in enumerate(items)]
    actions = [np.flatnonzero(np.asarray(item.action_mask)) for item in items]
    sampler_logps = [np.asarray(read_sampler_logps(item), dtype=np.float64) for item in items]
    return Comparison(
        items=list(items),
        positions=[positions[positions > 0] for positions in actions],
        sampler_logps=[values[positions > 0] for values, positions in zip(sampler_logps, actions, strict=True)],
        trainer_logps=[row[positions[positions > 0] - 1] for row, positions in zip(rows, actions, strict=True)],
        all_trainer_logps=rows,
    )


def mean_absolute(parts: Sequence[Floats]) -> float:
    return array_mean_or_zero(np.abs(_nan_to_infinity(np.concatenate(list(parts)))))


def _nan_to_infinity(values: Floats) -> Floats:
    return np.where(np.isnan(values), np.inf, values)


def read_sampler_logps(item: SAWItem) -> Any:
    assert item.actor_logps is not None
    return item.actor_logps.token_logps
