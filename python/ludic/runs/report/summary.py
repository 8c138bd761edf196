"""The parts of summary.json and of the printed report that several commands have: how the run
ended, what was trained, lost episodes and cut samples; what it cost; and the files of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ludic.errors import CheckpointError
from ludic.files.atomic import read_json, write_text
from ludic.runs.directory import DONE, Progress, RunDirectory

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
    with suppress(CheckpointError, OSError):  # it is damaged, or not written yet
        if progress.phase == DONE and read_json(directory.summary).get("status") == FINISHED:
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


_TOKEN_KEYS = ("real_tokens", "padded_tokens", "padded_tokens_greedy", "padded_tokens_unpacked", "shared_tokens")


def sum_phases(
    seconds: Mapping[str, float],
    lines: Sequence[Mapping[str, float]],
    *,
    own: Sequence[str] = ("set_up", "evaluate"),
    timed: Sequence[str] = ("batching", "forward_backward", "optimizer", "checkpoint"),
) -> dict[str, float]:
    """Seconds by phase: the run's `own` phases (set-up reads the data), the start of a server if
    there was one, the parts of a step that the trainer `timed`, and the rest."""
    whole = {name: seconds.get(name, 0.0) for name in own}
    whole |= {name: seconds[name] for name in ("server_start",) if name in seconds}
    parts = {name: sum(line.get(f"perf/{name}_s", 0.0) for line in lines) for name in timed}
    rest = seconds.get("wall", 0.0) - sum(whole.values()) - sum(parts.values())
    return {name: round(value, 2) for name, value in {**whole, **parts, "other": max(0.0, rest)}.items()}


def sum_padding(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Tokens of all training passes, as they were packed and as other packings would compute
    them."""
    real, computed, greedy, unpacked, shared = (sum(line.get(f"perf/{key}", 0.0) for line in lines) for key in _TOKEN_KEYS)
    if not computed:
        return {}
    return {
        "real_tokens": real,
        "computed_tokens": computed,
        "greedy_tokens": greedy,
        "unpacked_tokens": unpacked,
        "shared_tokens": shared,
        "saved_vs_greedy": 1 - computed / greedy,
        "saved_vs_unpacked": 1 - computed / unpacked,
    }


def format_padding(padding: Mapping[str, float]) -> str:
    if not padding:
        return "[bold]Padding[/]: there were no training tokens"
    shared = padding.get("shared_tokens", 0)  # absent in summaries of before
    once = f" ({shared:,.0f} more, of beginnings that samples share, were computed once)" if shared else ""
    return (
        f"[bold]Padding[/]: {padding['computed_tokens']:,.0f} tokens computed for {padding['real_tokens']:,.0f} real ones{once}; greedy "
        f"packing would compute {padding['greedy_tokens']:,.0f} ({padding['saved_vs_greedy']:.1%} saved), no packing "
        f"{padding['unpacked_tokens']:,.0f} ({padding['saved_vs_unpacked']:.1%} saved)"
    )


def show_costs(console: Console, summary: Mapping[str, Any], *, speed: str = "") -> None:
    """Print the lines of `wall_s`, `phases_s`, `execution_s` if there is one, `padding` and
    `memory`. `speed` ends the first."""
    wall_s, execution_s, peaks = summary["wall_s"], summary.get("execution_s"), summary["memory"]
    phases = ", ".join(f"{name.replace('_', ' ')} {seconds:.1f}" for name, seconds in summary["phases_s"].items())
    console.print(f"[bold]Seconds[/]: {wall_s:.1f} in all; {phases}{speed}")
    if execution_s is not None:
        share = execution_s / max(wall_s, 1e-9)
        console.print(f"[bold]Programs[/] ran during {execution_s:.1f} s, {share:.0%} of the wall time")
    console.print(format_padding(summary["padding"]))
    gpu = f", {peaks['gpu_peak_mb']:,.0f} MiB on the GPU" if "gpu_peak_mb" in peaks else ""
    console.print(f"[bold]Memory[/]: {peaks['process_peak_mb']:,.0f} MiB of this process at its peak{gpu}")


def make_table(title: str, columns: Sequence[str], *, right: Sequence[str] = ()) -> Table:
    """A table without rows. The columns in `right` are aligned there."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def write_summary(directory: RunDirectory, summary: Mapping[str, Any]) -> str:
    """Write summary.json whole, and return its text."""
    text = json.dumps(summary, indent=2) + "\n"
    write_text(directory.summary, text)
    return text


def describe_files(
    directory: RunDirectory, pictures: Mapping[Path, str], episodes_or_rows: Mapping[Path, str]
) -> dict[Path, str]:
    """The content of each file of a training run: files that all commands write, its `pictures`,
    and the episodes or rows that it trained on."""
    return {
        directory.summary: "this, for programs",
        **pictures,
        directory.config: f"the resolved settings; `ludic {directory.command}` reads them",
        directory.metrics: "every step",
        **episodes_or_rows,
        directory.model: "model and tokenizer in Hugging Face layout",
        directory.adapter: "the adapters alone, in PEFT's layout; they are merged in model",
        directory.base: "what the adapters adapt",
    }


def show_files(console: Console, folder: Path, descriptions: Mapping[Path, str]) -> None:
    """Print the files in `folder` with their descriptions; those that do not exist are skipped."""
    console.print(f"[bold]Written to[/] {folder}/")
    for path, description in descriptions.items():
        if path.exists():
            console.print(f"  {path.name:<16}{description}", markup=False)
