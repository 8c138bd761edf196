"""The report of a supervised run and its summary.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ludic.inference.local.client import end_token_ids
from ludic.runs.data.sft import describe_missing_ends
from ludic.runs.directory import DONE
from ludic.runs.report.costs import show_costs, sum_padding, sum_phases
from ludic.runs.report.curve import draw_text_curve, write_picture
from ludic.runs.report.files import describe_files, show_files, write_summary
from ludic.runs.report.provenance import provenance
from ludic.training.backend.memory import memory_peaks

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.runs.sft import SFTRun


def conclude(run: SFTRun, console: Console, *, config_hash: str) -> str:
    """Write summary.json and loss.png and print the report. Returns the summary as JSON."""
    lines = run.directory.read_steps("sft")
    summary = build_summary(run, lines, config_hash=config_hash)
    text = write_summary(run.directory, summary)
    losses = [line["train/loss"] for line in lines]
    if losses:
        _draw(run, summary, losses)
    _show(run, console, summary, losses)
    return text


def build_summary(run: SFTRun, lines: Sequence[dict[str, Any]], *, config_hash: str) -> dict[str, Any]:
    """The content of summary.json. `before` and `after` are null if nothing is held out, `after`
    also if the run was stopped."""
    if run.recipe.streaming and run.source is None and run.directory.summary.is_file():  # a finished run is shown again
        earlier: dict[str, Any] = json.loads(run.directory.summary.read_text(encoding="utf-8"))
        return earlier
    data = run.parts.data
    return {
        **provenance(run.progress, model=run.recipe.model, algorithm="sft"),
        "before": run.progress.before,
        "after": run.progress.after,
        "wall_s": round(run.progress.seconds.get("wall", 0.0), 2),
        "phases_s": sum_phases(run.progress.seconds, lines),
        "padding": sum_padding(lines),
        "memory": memory_peaks(),
        "steps": run.progress.steps,
        "early_stopping": run.progress.early_stopping,
        "epochs": round(data.count_epochs(run.source, run.progress.steps, run.recipe.batch_size), 3),
        "data": data.count(run.source, run.parts.cfg.max_seq_len, end_token_ids(run.parts.model, run.parts.tokenizer)),
        "seed": run.recipe.seed,
        "config_hash": config_hash,
    }


def _draw(run: SFTRun, summary: dict[str, Any], losses: Sequence[float]) -> None:
    measured = summary["before"] is not None and summary["after"] is not None
    marks = {"held-out loss": (summary["before"]["loss"], summary["after"]["loss"])} if measured else {}
    title = f"supervised fine-tuning, seed {run.recipe.seed}"
    write_picture(run.directory.picture, {"loss": losses}, marks=marks, title=title, measure="nats per token")


def _show(run: SFTRun, console: Console, summary: dict[str, Any], losses: Sequence[float]) -> None:
    before, after, data = summary["before"], summary["after"], summary["data"]
    if before is not None:
        later = f"{after['loss']:.4f} (perplexity {after['perplexity']:.3f})" if after else "not measured"
        console.print(f"[bold]Held-out loss[/]: {before['loss']:.4f} before, {later} after", highlight=False)
    if run.progress.phase == DONE and summary["steps"] < run.parts.steps:
        who = "Early stopping" if run.progress.stopped_by is None else run.progress.stopped_by["callback"]
        console.print(f"{who} ended the run at step {summary['steps']} of {run.parts.steps}.", highlight=False, markup=False)
    console.print(
        f"[bold]Data[/]: {data['samples']:,} samples of {data['tokens']:,} tokens, {data['trained_tokens']:,} of them trained; "
        f"{data['samples_cut']:,} longer than max_seq_len were cut, {data['samples_cut_empty']:,} of them to nothing",
        highlight=False,
    )
    if data["samples_without_end"]:
        missing = describe_missing_ends(data["samples_without_end"], run.parts.tokenizer)
        console.print(missing, highlight=False, markup=False)
    for line in draw_text_curve(losses):
        console.print(line, highlight=False, markup=False)
    show_costs(console, summary)
    directory = run.directory
    files = describe_files(
        directory, {directory.picture: "the loss curve"}, {directory.demonstrations: "the rows that were trained on"}
    )
    show_files(console, directory.path, files)
