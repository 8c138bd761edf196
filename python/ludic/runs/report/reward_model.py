"""The report of a reward-model run and its summary.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ludic.models.quantization import count_weights
from ludic.runs.report.curve import write_picture
from ludic.runs.report.files import describe_files, show_files, write_summary
from ludic.runs.report.pairs import (
    describe_data,
    describe_pictures,
    describe_rows,
    measured_by_step,
    show_best_accuracy,
    show_pair_costs,
    summarize,
)
from ludic.runs.report.provenance import provenance

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.runs.reward_model import RMRun

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
    lines = run.directory.read_steps("rm")
    summary = build_summary(run, lines, config_hash=config_hash)
    text = write_summary(run.directory, summary)
    if lines:
        _draw(run, summary, lines)
    _show(run, console, summary)
    return text


def build_summary(run: RMRun, lines: Sequence[Mapping[str, float]], *, config_hash: str) -> dict[str, Any]:
    """The content of summary.json. It has the `eval_` metrics and `train_pairwise_accuracy` once
    the run is finished, the `eval_` metrics only if pairs are held out."""
    trained = count_weights(run.parts.model, trained=True)
    return {
        **provenance(run.progress, model=run.recipe.model, algorithm="bradley_terry"),
        **(run.progress.after or {}),
        **summarize(run, lines),
        "parameters": trained + count_weights(run.parts.model, trained=False),
        "trained_parameters": trained,
        "data": run.parts.data.counts(),
        "seed": run.recipe.seed,
        "config_hash": config_hash,
    }


def _draw(run: RMRun, summary: Mapping[str, Any], lines: Sequence[Mapping[str, float]]) -> None:
    series = {name: [line[f"train/{name}"] for line in lines] for name in ("loss", "accuracy")}
    title = f"reward model, seed {run.recipe.seed}"
    measured = {"held-out accuracy": measured_by_step(run.directory, run.progress, summary, "pairwise_accuracy")}
    write_picture(run.directory.picture, series, marks={}, measured=measured, title=title)


def _show(run: RMRun, console: Console, summary: Mapping[str, Any]) -> None:
    if "eval_loss" in summary:
        console.print(_make_criteria_table(summary))
        if run.progress.early_stopping is not None:
            console.print(
                "Early stopping chose the weights by these same pairs, so the figures are slightly optimistic; for figures to publish, "
                "measure on other pairs (heldout_data=FILE in a separate run with steps=0)",
                highlight=False,
            )
    show_best_accuracy(console, summary)
    data = summary["data"]
    console.print(describe_data(data), highlight=False)
    if data["left_out"] or data["heldout_left_out"]:
        console.print(_make_left_out_table(data))
    show_pair_costs(console, summary)
    directory = run.directory
    pictures = describe_pictures(directory, margins="the score differences of the held-out pairs")
    show_files(console, directory.path, describe_files(directory, pictures, describe_rows(directory)))


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
