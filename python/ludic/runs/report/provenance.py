"""The parts of a summary other than the results: how the run ended, what was trained, library
versions, lost episodes and cut samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.errors import CheckpointError
from ludic.files.atomic import read_json
from ludic.runs.directory import DONE, Progress, RunDirectory
from ludic.runs.report.files import write_summary

FINISHED, INTERRUPTED, FAILED = "finished", "interrupted", "failed"
"""How a run ended, or was left."""

_LOST = {
    "failed": "num_failed_episodes",
    "retried": "num_retried_episodes",
    "cancelled": "num_cancelled_episodes",
    "dropped_groups": "num_dropped_groups",
}
"""Name in the summary to name in metrics.jsonl."""
_CUT = {"answers_cut": "completion_truncated_rate", "cut_to_max_seq_len": "seq_len_truncated_rate"}
_ALGORITHMS = {"sft": "sft", "train-rm": "bradley_terry", "dpo": "dpo"}
"""Command to the algorithm of all of its runs."""


def provenance(progress: Progress, *, model: str | None, algorithm: str | None) -> dict[str, Any]:
    """`status` is finished, interrupted or failed; `stopped_by` is the callback that ended the run,
    null if none did; `model` is null for a small model that was made; `versions` are those at the
    start of the run, null in the folder of an older version."""
    return {
        "status": find_status(progress),
        "stopped_by": progress.stopped_by,
        "model": model,
        "algorithm": algorithm,
        "versions": progress.versions,
    }


def find_status(progress: Progress) -> str:
    """finished, interrupted or failed, as progress.json has it; that a process works on the run is
    not in it."""
    if progress.failed is not None:
        return FAILED
    return FINISHED if progress.phase == DONE else INTERRUPTED


def find_algorithm(progress: Progress) -> str | None:
    """The algorithm of the run's settings; null in the folder of an older version."""
    return _ALGORITHMS.get(progress.command) or (progress.recipe or {}).get("algorithm")


def write_failure(directory: RunDirectory, progress: Progress) -> None:
    """Write the summary.json of a run that has failed: `status`, the error as `failed`, and the
    facts that need no objects of the run. It replaces the summary of an earlier attempt, whose
    results the run has gone beyond; the summary of a finished run, which was only looked at again,
    stays."""
    if progress.phase == DONE and _has_finished(directory):
        return
    lines = directory.read_steps(directory.last_phase)
    recipe = progress.recipe or {}
    content = {
        **provenance(progress, model=recipe.get("model"), algorithm=find_algorithm(progress)),
        "failed": progress.failed,
        "steps": lines[-1]["step"] if lines else 0,
        "episodes": count_lost_episodes(lines),
        "samples": count_samples(lines),
        "wall_s": round(progress.seconds.get("wall", 0.0), 2),
        "seed": recipe.get("seed"),
    }
    write_summary(directory, content)


def _has_finished(directory: RunDirectory) -> bool:
    """Whether summary.json belongs to a finished run."""
    try:
        return read_json(directory.summary).get("status") == FINISHED
    except (CheckpointError, OSError):  # damaged, or not written yet
        return False


def count_lost_episodes(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The number of episodes that failed, were retried or were cancelled in all logged steps,
    and of groups that were dropped for them."""
    return {name: int(sum(line.get(f"train/{key}") or 0 for line in lines)) for name, key in _LOST.items()}


def count_samples(lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The samples of all logged steps: how many were `trained`; of those, in how many the answer
    reached its token limit (`answers_cut`), and how many were cut to `max_seq_len`; and how many
    were dropped because the cut left nothing (`cut_to_nothing`).

    A line has shares of its samples. Example: a share of 0.25 of 8 samples is 2.
    """
    cut = {
        name: sum(round((line.get(f"train/{key}") or 0) * (line.get("train/num_samples") or 0)) for line in lines)
        for name, key in _CUT.items()
    }
    return {
        "trained": int(sum(line.get("train/num_samples") or 0 for line in lines)),
        **cut,
        "cut_to_nothing": int(sum(line.get("train/seq_len_truncated_empty") or 0 for line in lines)),
    }


def format_lost(lost: Mapping[str, int]) -> str | None:
    """The totals in words; None if nothing was lost."""
    if not lost["failed"] and not lost["dropped_groups"]:
        return None
    return (
        f"[bold]Lost[/]: {lost['failed']:,} training episodes failed, and {lost['dropped_groups']:,} groups were dropped for them; they "
        "are in no reward"
    )
