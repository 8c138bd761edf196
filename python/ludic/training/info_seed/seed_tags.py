"""Trains seeded completions under the plain prompt, so that the seed shows in the completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ludic.errors import DataError
from ludic.training.types import SAWBatch, SAWItem
from ludic.types import group_of

SEED_ID = "seed_id"
"""Key of a seeded request's meta."""
WITHOUT_PLAIN = "seed/without_plain"
"""Key of the batch's meta: number of seeded samples that were dropped."""


def seed_of(meta: dict[str, Any]) -> int:
    """The seed of a rollout or a sample, read from its meta; 0 if it has none."""
    return int((meta.get("request_meta") or {}).get(SEED_ID) or 0)


def without_tags(batch: SAWBatch) -> SAWBatch:
    """Replace the prompt of each seeded sample by the prompt of a plain sample of its group.
    Nothing is tokenized: the ids are copied. Changes `batch.items`.

    A seeded sample whose group has no plain sample left is dropped. Their number is
    `batch.meta["seed/without_plain"]`, which the trainer logs. Raises DataError for samples of
    several turns.

    Example: plain [p q | a], seeded [p q s | b c] becomes [p q | b c].
    """
    prompts: dict[Any, list[int]] = {}
    for item in batch.items:
        if item.meta.get("step_index"):
            raise DataError(f"InfoSeed needs rollouts of one turn; {item.meta.get('rollout_id')} has several")
        if not seed_of(item.meta):
            prompts.setdefault(group_of(item.meta), list(item.input_ids[: _prompt_length(item.action_mask)]))
    items = [
        _with_prompt(item, prompts[group_of(item.meta)]) if seed_of(item.meta) else item
        for item in batch.items
        if not seed_of(item.meta) or group_of(item.meta) in prompts
    ]
    batch.meta[WITHOUT_PLAIN] = len(batch.items) - len(items)
    batch.items = items
    return batch


def _prompt_length(action_mask: Sequence[int]) -> int:
    """Number of tokens before the first action token."""
    return next((index for index, acts in enumerate(action_mask) if acts), len(action_mask))


def _with_prompt(item: SAWItem, prompt: list[int]) -> SAWItem:
    start = _prompt_length(item.action_mask)
    completion = list(item.input_ids[start:])
    meta = {**item.meta, "prompt_length": len(prompt)} if "prompt_length" in item.meta else item.meta
    return replace(
        item,
        input_ids=prompt + completion,
        attention_mask=[1] * (len(prompt) + len(completion)),
        action_mask=[0] * len(prompt) + list(item.action_mask[start:]),
        meta=meta,
    )
