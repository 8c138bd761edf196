"""What a summary says of a run beside its results: how it ended, what was trained, with which
versions, and what was lost on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.runs.directory import DONE, Progress

_LOST = {
    "failed": "num_failed_episodes",
    "retried": "num_retried_episodes",
    "cancelled": "num_cancelled_episodes",
    "dropped_groups": "num_dropped_groups",
}
"""Name in the summary to name in metrics.jsonl."""


def provenance(progress: Progress, *, model: str | None, algorithm: str) -> dict[str, Any]:
    """`status` is finished or interrupted; `model` null where a small one was made; `versions`
    those at the run's beginning, null in a folder of an older version."""
    status = "finished" if progress.phase == DONE else "interrupted"
    return {"status": status, "model": model, "algorithm": algorithm, "versions": progress.versions}


def lost_episodes(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Episodes of all logged steps that failed, were played again or were called off, and groups
    that were left out for them."""
    return {name: int(sum(line.get(f"train/{key}") or 0 for line in lines)) for name, key in _LOST.items()}


def lost_line(lost: Mapping[str, int]) -> str | None:
    """The total, for people; None where nothing was lost."""
    if not lost["failed"] and not lost["dropped_groups"]:
        return None
    return (
        f"[bold]Lost[/]: {lost['failed']:,} training episodes failed, and {lost['dropped_groups']:,} groups were left out for them; they "
        "are in no reward"
    )
