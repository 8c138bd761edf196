"""Macro-batches to collate, the same for the same seed. Lengths are lognormal around 512 tokens;
the first quarter of each sample is its prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludic import _core
from ludic.training.types import ActorTokenLogps, SampleAttachments, SAWItem

PAD = 0
VOCABULARY = 50_000


def draw_lengths(samples: int, seed: int = 0) -> NDArray[np.int32]:
    """[N] W1: lognormal, median 512, sigma 0.9, clipped to [16, 4096]."""
    lengths = np.random.default_rng(seed).lognormal(np.log(512), 0.9, samples)
    return lengths.clip(16, 4096).astype(np.int32)


def list_items(samples: int, seed: int = 0) -> list[SAWItem]:
    """Samples as rollouts make them: lists of int and float without shared objects."""
    rng = np.random.default_rng(seed + 1)
    return [_item(rng, int(length)) for length in draw_lengths(samples, seed)]


def _item(rng: np.random.Generator, length: int) -> SAWItem:
    prompt = length // 4
    logps = rng.uniform(-3, 0, length - prompt).astype(np.float32)
    return SAWItem(
        input_ids=rng.integers(3, VOCABULARY, length).tolist(),
        attention_mask=[1] * length,
        action_mask=[0] * prompt + [1] * (length - prompt),
        weight=float(rng.normal()),
        meta={
            "reward": float(rng.random()),
            "total_reward": float(rng.random()),
            "completion_length": length - prompt,
            "prompt_length": prompt,
            "truncated": bool(rng.random() < 0.2),
            "finish_reason": "length" if rng.random() < 0.2 else "stop",
            "step_index": 0,
            "env": {"correct": bool(rng.random() < 0.5), "steps": int(rng.integers(1, 9))},
        },
        attachments=SampleAttachments(ActorTokenLogps(logps.tolist())),
    )


def with_arrays(items: list[SAWItem], ids: type = np.int32, mask: type = np.uint8, *, of_a_queue: bool = False) -> list[SAWItem]:
    """The same samples with numpy arrays instead of lists. `of_a_queue`: as groups of a queue
    become samples, with log-probabilities of 64 bits."""

    def convert(item: SAWItem) -> SAWItem:
        assert item.actor_logps is not None
        logps: Any = np.array(item.actor_logps.token_logps, np.float64 if of_a_queue else np.float32)
        fields: dict[str, Any] = {
            "input_ids": np.array(item.input_ids, ids),
            "attention_mask": np.array(item.attention_mask, mask),
            "action_mask": np.array(item.action_mask, mask),
        }
        return replace(item, **fields, attachments=SampleAttachments(ActorTokenLogps(logps)))

    return [convert(item) for item in items]


def micro_batches(items: list[SAWItem], budget: int) -> list[NDArray[np.int64]]:
    """The sample indices of the greedy micro-batches."""
    plan = _core.plan_greedy(np.array([len(item.input_ids) for item in items], np.int32), budget)
    return [plan[k] for k in range(len(plan))]


def over_batches(function: Callable[[Any], Any], batches: list[Any]) -> Callable[[], Any]:
    """A run that applies `function` to each micro-batch and returns the last result. As in
    training, only one result is alive at a time."""

    def run() -> Any:
        result = None
        for batch in batches:
            result = function(batch)
        return result

    return run
