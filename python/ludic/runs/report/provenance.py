"""The parts of a summary besides the results: how the run ended, what was trained, library
versions, and lost episodes."""

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
    """`status` is finished or interrupted; `stopped_by` is the callback that ended the run, null if
    none did; `model` is null for a small model that was made; `versions` are those at the start of
    the run, null in the folder of an older version."""
    status = "finished" if progress.phase == DONE else "interrupted"
    return {
        "status": status,
        "stopped_by": progress.stopped_by,
        "model": model,
        "algorithm": algorithm,
        "versions": progress.versions,
    }


def count_lost_episodes(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The number of episodes that failed, were retried or were cancelled in all logged steps,
    and of groups that were dropped for them."""
    return {name: int(sum(line.get(f"train/{key}") or 0 for line in lines)) for name, key in _LOST.items()}


def format_lost(lost: Mapping[str, int]) -> str | None:
    """The totals in words; None if nothing was lost."""
    if not lost["failed"] and not lost["dropped_groups"]:
        return None
    return (
        f"[bold]Lost[/]: {lost['failed']:,} training episodes failed, and {lost['dropped_groups']:,} groups were dropped for them; they "
        "are in no reward"
    )
