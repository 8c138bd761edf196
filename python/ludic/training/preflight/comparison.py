"""The trainer's log-probabilities of samples beside those of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludic.training.averages import array_mean_or_zero
from ludic.training.backend.protocol import TrainingBackend
from ludic.training.batching.micro_batching import MicroBatch, collate_saw_items
from ludic.training.config import TrainerConfig
from ludic.training.types import SAWItem

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """Log-probabilities of the same action tokens, sample by sample."""

    items: list[SAWItem]
    places: list[NDArray[np.int64]]
    """Of each sample: where in its ids the compared tokens are. The first id of a sample is
    predicted by none."""
    sampler: list[Floats]
    trainer: list[Floats]
    rows: list[Floats]
    """Of each sample: the trainer's log-probabilities of all its tokens but the first."""

    @cached_property
    def differences(self) -> list[Floats]:
        return [trainer - sampler for trainer, sampler in zip(self.trainer, self.sampler, strict=True)]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.places))

    @property
    def mean(self) -> float:
        """Mean absolute difference; infinite where the trainer finds a token impossible."""
        return mean_absolute(self.differences)

    @property
    def max(self) -> float:
        return max((float(np.abs(part).max()) for part in self.differences if len(part)), default=0.0)

    def worst(self, count: int) -> list[tuple[int, int]]:
        """(sample, position) of the largest differences, largest first."""
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
    """The trainer's log-probabilities of the samples, beside those that came with them. One
    forward pass."""
    shaping: dict[str, Any] = {} if temperature is None and top_p == 1.0 else {"temperature": temperature, "top_p": top_p}
    tensors = collate_saw_items(items, pad_token_id=cfg.pad_token_id, device=cfg.model_device)
    logps = await backend.forward_logprobs(MicroBatch(tensors, len(items)), **shaping).result()
    table = logps.double().cpu().numpy()
    rows = [table[i, : len(item.input_ids) - 1] for i, item in enumerate(items)]
    actions = [np.flatnonzero(np.asarray(item.action_mask)) for item in items]
    sampler_logps = [np.asarray(read_sampler_logps(item), dtype=np.float64) for item in items]
    return Comparison(
        items=list(items),
        places=[places[places > 0] for places in actions],
        sampler=[values[places > 0] for values, places in zip(sampler_logps, actions, strict=True)],
        trainer=[row[places[places > 0] - 1] for row, places in zip(rows, actions, strict=True)],
        rows=rows,
    )


def mean_absolute(parts: Sequence[Floats]) -> float:
    return array_mean_or_zero(np.abs(np.concatenate(list(parts))))


def read_sampler_logps(item: SAWItem) -> Any:
    assert item.actor_logps is not None
    return item.actor_logps.token_logps
