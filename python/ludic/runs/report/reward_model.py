"""The report of a reward-model run and its summary.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ludic.files.atomic import write_text
from ludic.models.quantization import count_weights
from ludic.runs.report.costs import format_memory, format_padding, format_seconds, sum_padding, sum_phases
from ludic.runs.report.curve import write_picture
from ludic.runs.report.files import describe_files, show_files
from ludic.runs.report.provenance import provenance
from ludic.training.backend.memory import memory_peaks

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.runs.reward_model import RMRun

_EVALUATED = "eval/pairwise_accuracy"

CRITERIA: dict[str, tuple[str, Callable[[Mapping[str, float]], float], Callable[[float], bool]]] = {
    "held-out accuracy": ("over 60 %", lambda summary: summary["eval_pairwise_accuracy"], lambda value: value > 0.6),
    "median margin": ("over 0", lambda summary: summary["eval_margin_p50"], lambda value: value > 0),
    "negative margins": ("under 40 %", lambda summary: summary["eval_negative_margin_rate"], lambda value: value < 0.4),
    "calibration error": ("under 0.15", lambda summary: summary["eval_ece"], lambda value: value < 0.15),
    "train-test gap": (
        "under 15 points",
        lambda summary: summary["train_pairwise_accuracy"] - summary["eval_pairwise_accuracy"],
        lambda value: value < 0.15,
    ),
}
"""Name -> (rule in words, value, rule). A reward model that breaks one should not be optimised
against."""


def conclude(run: RMRun, console: Console, *, config_hash: str) -> str:
    """Write summary.json and training.png and print the report. Returns the summary as JSON."""
    lines = [line for line in run.directory.read_metrics("rm") if "train/loss" in line]
    summary = build_summary(run, lines, config_hash=config_hash)
    text = json.dumps(summary, indent=2) + "\n"
    write_text(run.directory.summary, text)
    if lines:
        _draw(run, summary, lines)
    _show(run, console, summary)
    return text


def build_summary(run: RMRun, lines: Sequence[Mapping[str, float]], *, config_hash: str) -> dict[str, Any]:
    """The content of summary.json. It has the `eval_` metrics and `train_pairwise_accuracy` once
    the run is finished, the `eval_` metrics only if pairs are held out."""
    data, steps = run.parts.data, run.progress.steps
    trained = count_weights(run.parts.model, trained=True)
    pairs = sum(line.get("train/total_pairs", 0.0) for line in lines)
    seconds = sum(line.get("perf/step_s", 0.0) for line in lines)
    return {
        **provenance(run.progress, model=run.recipe.model, algorithm="bradley_terry"),
        **(run.progress.after or {}),
        "bayes_accuracy": data.bayes_accuracy,
        "latent_accuracy": data.latent_accuracy,
        "wall_s": round(run.progress.seconds.get("wall", 0.0), 2),
        "phases_s": sum_phases(run.progress.seconds, lines),
        "pairs_per_s": round(pairs / seconds, 1) if seconds else None,
        "padding": sum_padding(lines),
        "memory": memory_peaks(),
        "steps": steps,
        "early_stopping": run.progress.early_stopping,
        "epochs": round(steps * run.recipe.batch_size / (len(data.train) // 2), 3),
        "parameters": trained + count_weights(run.parts.model, trained=False),
        "trained_parameters": trained,
        "data": data.counts(),
        "seed": run.recipe.seed,
        "config_hash": config_hash,
    }


def _draw(run: RMRun, summary: Mapping[str, Any], lines: Sequence[Mapping[str, float]]) -> None:
    series = {name: [line[f"train/{name}"] for line in lines] for name in ("loss", "accuracy")}
    title = f"reward model, seed {run.recipe.seed}"
    measured = {"held-out accuracy": accuracy_by_step(run, summary)}
    write_picture(run.directory.picture, series, marks={}, measured=measured, title=title)


def accuracy_by_step(run: RMRun, summary: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(step, held-out accuracy) of every evaluation: during training, and of the final model."""
    accuracies = {line["step"]: line[_EVALUATED] for line in run.directory.read_metrics("rm") if _EVALUATED in line}
    if "eval_pairwise_accuracy" in summary:
        final = run.progress.early_stopping or {"kept_step": run.progress.steps}
        accuracies[final["kept_step"]] = summary["eval_pairwise_accuracy"]
    return sorted(accuracies.items())


def _show(run: RMRun, console: Console, summary: Mapping[str, Any]) -> None:
    if "eval_loss" in summary:
        console.print(_make_criteria_table(summary))
        if run.progress.early_stopping is not None:
            console.print(
                "Early stopping chose the weights by these same pairs, so the figures are slightly optimistic; for figures to publish, "
                "measure on other pairs (heldout_data=FILE in a separate run with steps=0)",
                highlight=False,
            )
    if summary["bayes_accuracy"] is not None:
        console.print(
            f"[bold]Best possible accuracy[/]: {summary['bayes_accuracy']:.1%} on average over such pairs; the generator's own quality "
            f"predicts {summary['latent_accuracy']:.1%} of the labels of these pairs",
            highlight=False,
        )
    data = summary["data"]
    console.print(
        f"[bold]Data[/]: {data['pairs']:,} pairs of {data['tokens']:,} tokens, {data['pairs_cut']:,} of them cut to max_seq_len; "
        f"{data['heldout_pairs']:,} held out",
        highlight=False,
    )
    if data["left_out"] or data["heldout_left_out"]:
        console.print(_make_left_out_table(data))
    speed = f"; {summary['pairs_per_s']:,.0f} pairs a second in training" if summary["pairs_per_s"] else ""
    console.print(f"{format_seconds(summary['wall_s'], summary['phases_s'])}{speed}", highlight=False)
    console.print(format_padding(summary["padding"]), highlight=False)
    console.print(format_memory(summary["memory"]), highlight=False)
    directory = run.directory
    pictures = {
        directory.picture: "loss and accuracy of the training batches",
        directory.reliability: "how often a stated probability comes true",
        directory.margins: "the score differences of the held-out pairs",
    }
    pairs = {directory.pairs: "the pairs that were trained on", directory.heldout_pairs: "the pairs that were measured"}
    show_files(console, directory.path, describe_files(directory, pictures, pairs))


def _make_left_out_table(data: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title="Rows that make no pair", title_justify="left")
    for column in ("", "left out", "of the held-out data"):
        table.add_column(column, justify="right" if column else "left")
    trained, heldout = data["left_out"], data["heldout_left_out"]
    for reason in sorted({*trained, *heldout}):
        table.add_row(reason.replace("_", " "), f"{trained.get(reason, 0):,}", f"{heldout.get(reason, 0):,}")
    return table


def _make_criteria_table(summary: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title=f"{summary['eval_num_pairs']:,.0f} held-out pairs", title_justify="left")
    for column in ("", "measured", "should be", ""):
        table.add_column(column, justify="right" if column == "measured" else "left")
    for name, (rule, value_of, holds) in CRITERIA.items():
        value = value_of(summary)
        table.add_row(name, f"{value:.4f}", rule, "[green]✓[/]" if holds(value) else "[red]✗[/]")
    return table
