"""The trainer's log-probabilities of the sampled tokens of some batches, in a file of JSON lines
next to the log of the rollouts. `ludic view` shows how far they are from the sampler's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludic.files.jsonl import append_jsonl, measure_log, truncate_log
from ludic.list_fields import stored
from ludic.training.batching.mini_batches import MacroBatch

DIGITS = 4
"""Decimal places of a log-probability."""


class TokenLog:
    """Appends a line for each sample of every `every`-th batch: `id` (the id of its rollout),
    `step` (its index in the rollout), `logps` (one for each sampled token that is trained on, with
    the weights that the training step begins with; null for one that is not finite) and `skipped`,
    the number of sampled tokens before these. They cost a forward pass over such a batch."""

    def __init__(self, path: Path, every: int) -> None:
        """`every`: batch 0 and every `every`-th after it. 0 means none."""
        self._path, self._every = path, every

    def is_due(self, number: int) -> bool:
        """Whether batch `number`, the first of which is 0, is logged. Batches are counted as their
        source does, so that these are the batches of the log of rollouts; one without samples to
        train on has no training step."""
        return self._every > 0 and number % self._every == 0

    def state_dict(self) -> dict[str, int]:
        """The size of the file."""
        return {"bytes": measure_log(self._path)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Remove what was logged after `state`: those batches are trained again."""
        truncate_log(self._path, int(state["bytes"]))

    def write(self, macro: MacroBatch, logps: Mapping[int, Tensor]) -> None:
        """`logps`: row -> [A] of its action tokens. A first token, which has no prediction, is no
        part of them. Rows of samples that no rollout of the log has are left out."""
        append_jsonl(self._path, list(_list_lines(macro, logps)))


def _list_lines(macro: MacroBatch, logps: Mapping[int, Tensor]) -> list[dict[str, Any]]:
    if not logps:
        return []
    rows = [row for row in sorted(logps) if "rollout_id" in macro.items[row].meta]
    sizes = [len(logps[row]) for row in rows]
    values = torch.cat([logps[row] for row in rows]).double().cpu() if rows else torch.zeros(0)
    lines = []
    for row, own in zip(rows, values.split(sizes), strict=True):
        item = macro.items[row]
        lines.append(
            {
                "id": item.meta["rollout_id"],
                "step": item.meta.get("step_index", 0),
                "skipped": int(stored(item, "action_mask")[0] == 1),
                "logps": [round(value, DIGITS) for value in own.tolist()],
            }
        )
    return lines
