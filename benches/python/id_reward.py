"""A task for runs in which every step changes the weights: a reward that almost never ties."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def mean_id(completion_ids: list[list[int]], **_: object) -> list[float]:
    """The mean token id of each completion, in [0, 1] for bytes."""
    return [sum(ids) / (256 * max(1, len(ids))) for ids in completion_ids]


def even_sum(answers: Sequence[Any]) -> bool:
    """A filter of groups that refuses about half of them, whatever the policy."""
    return sum(token for answer in answers for token in answer.tokens) % 2 == 0


def write_problems(path: Path) -> list[str]:
    """Write 30 prompts with short answers to `path`. Returns the settings of the task."""
    rows = [{"prompt": f"{n * 7919 % 100000}>", "completion": f"{n:03d}"} for n in range(30)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    reward = "reward=benches.python.id_reward:mean_id"
    return [f"data={path}", reward, "task.args.max_new_tokens=4", "task.args.num_heldout=3", "trainer.lr=3e-3"]
