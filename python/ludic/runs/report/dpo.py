"""The report of a run of direct preference optimization and its summary.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ludic.files.atomic import write_text
from ludic.runs.dpo_answers import read_answers
from ludic.runs.report.costs import format_memory, format_padding, format_seconds, sum_padding, sum_phases
from ludic.runs.report.curve import write_picture
from ludic.runs.report.dpo_conclusion import conclude as describe_results
from ludic.runs.report.files import describe_files, show_files
from ludic.runs.report.provenance import provenance
from ludic.training.backend.memory import memory_peaks

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.runs.dpo import DPORun

ACCURACY = "rewards/accuracies"
SHOWN_ANSWERS, SHOWN_CHARACTERS = 4, 60
RATES = {
    "score": "true quality",
    "well_formed": "well-formed",
    "finished": "ended",
}


def conclude(run: DPORun, console: Console, *, config_hash: str) -> str:
    """Write summary.json and training.png and print the report. Returns the summary as JSON."""
    lines = [line for line in run.directory.read_metrics("dpo") if "train/loss" in line]
    summary = build_summary(run, lines, config_hash=config_hash)
    text = json.dumps(summary, indent=2) + "\n"
    write_text(run.directory.summary, text)
    if lines:
        _draw(run, summary, lines)
    _show(run, console, summary)
    return text


def build_summary(run: DPORun, lines: Sequence[Mapping[str, float]], *, config_hash: str) -> dict[str, Any]:
    """The content of summary.json. It has the `eval_` metrics and `after` once the run is finished,
    the `eval_` metrics only if pairs are held out."""
    data, steps, recipe = run.parts.data, run.progress.steps, run.recipe
    pairs = sum(line.get("train/total_pairs", 0.0) for line in lines)
    seconds = sum(line.get("perf/step_s", 0.0) for line in lines)
    after = run.progress.after or {}
    return {
        **provenance(run.progress, model=recipe.model, algorithm="dpo"),
        "loss_type": recipe.loss.loss_type,
        "beta": recipe.loss.beta,
        **{key: value for key, value in after.items() if key.startswith("eval_")},
        "before": run.progress.before,
        "after": {key: value for key, value in after.items() if not key.startswith("eval_")} or None,
        "bayes_accuracy": data.bayes_accuracy,
        "latent_accuracy": data.latent_accuracy,
        "wall_s": round(run.progress.seconds.get("wall", 0.0), 2),
        "phases_s": sum_phases(run.progress.seconds, lines),
        "pairs_per_s": round(pairs / seconds, 1) if seconds else None,
        "padding": sum_padding(lines),
        "memory": memory_peaks(),
        "steps": steps,
        "early_stopping": run.progress.early_stopping,
        "epochs": round(steps * recipe.batch_size / (len(data.train) // 2), 3),
        "data": data.counts(),
        "seed": recipe.seed,
        "config_hash": config_hash,
    }


def _draw(run: DPORun, summary: Mapping[str, Any], lines: Sequence[Mapping[str, float]]) -> None:
    series = {name: [line[f"train/{name}"] for line in lines] for name in ("loss", ACCURACY)}
    measured = {f"held-out {ACCURACY}": accuracy_by_step(run, summary)}
    title = f"{run.recipe.loss.loss_type} loss, beta {run.recipe.loss.beta:g}, seed {run.recipe.seed}"
    write_picture(run.directory.picture, series, marks={}, measured=measured, title=title)


def accuracy_by_step(run: DPORun, summary: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(step, held-out accuracy) of every evaluation: during training, and of the final model."""
    key = f"eval/{ACCURACY}"
    accuracies = {line["step"]: line[key] for line in run.directory.read_metrics("dpo") if key in line}
    if f"eval_{ACCURACY}" in summary:
        final = run.progress.early_stopping or {"kept_step": run.progress.steps}
        accuracies[final["kept_step"]] = summary[f"eval_{ACCURACY}"]
    return sorted(accuracies.items())


def _show(run: DPORun, console: Console, summary: Mapping[str, Any]) -> None:
    if "eval_loss" in summary:
        console.print(_make_pairs_table(summary))
    if summary["bayes_accuracy"] is not None:
        console.print(
            f"[bold]Best possible accuracy[/]: {summary['bayes_accuracy']:.1%} on average over such pairs; the generator's own quality "
            f"predicts {summary['latent_accuracy']:.1%} of the labels of these pairs",
            highlight=False,
        )
    if (summary["before"] or {}).get("answers") and summary["after"]:
        console.print(_make_rates_table(summary["before"], summary["after"]))
    rows = read_answers(run.directory.answers, before="end")
    if rows:
        console.print(_make_answers_table(rows))
    data = summary["data"]
    console.print(
        f"[bold]Data[/]: {data['pairs']:,} pairs of {data['tokens']:,} tokens, {data['pairs_cut']:,} of them cut to max_seq_len; "
        f"{data['heldout_pairs']:,} held out; {sum(data['left_out'].values()):,} rows make no pair",
        highlight=False,
    )
    speed = f"; {summary['pairs_per_s']:,.0f} pairs a second in training" if summary["pairs_per_s"] else ""
    console.print(f"{format_seconds(summary['wall_s'], summary['phases_s'])}{speed}", highlight=False)
    console.print(format_padding(summary["padding"]), highlight=False)
    console.print(format_memory(summary["memory"]), highlight=False)
    console.print(f"[bold]What this shows[/]: {describe_results(summary)}", highlight=False)
    _show_files(run, console)


def _show_files(run: DPORun, console: Console) -> None:
    directory = run.directory
    pictures = {
        directory.picture: "loss and accuracy of the training batches",
        directory.reliability: "how often a stated probability comes true",
        directory.margins: "the differences of the implicit rewards of the held-out pairs",
    }
    rows = {
        directory.pairs: "the pairs that were trained on",
        directory.heldout_pairs: "the pairs that were measured",
        directory.answers: "sampled answers, before and after",
        directory.reference_logps: "log-probabilities of the reference, for a resume",
        directory.reference: "the policy after the warm-up, which is the reference",
    }
    show_files(console, directory.path, describe_files(directory, pictures, rows))


def _make_pairs_table(summary: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title=f"{summary['eval_num_pairs']:,.0f} held-out pairs, by implicit rewards", title_justify="left")
    table.add_column("")
    table.add_column("after", justify="right")
    for name in (ACCURACY, "rewards/margins", "rewards/chosen", "rewards/rejected", "loss", "ece"):
        table.add_row(name, f"{summary[f'eval_{name}']:.4f}")
    return table


def _make_rates_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title=f"{after['answers']:,} sampled answers; 95 % intervals", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column, justify="right" if column else "left")
    for key, name in RATES.items():
        if key in before and key in after:
            table.add_row(name, _format_rate(before[key]), _format_rate(after[key]))
    return table


def _format_rate(rate: Mapping[str, float | None] | None) -> str:
    if rate is None:
        return "none"
    if rate["low"] is None or rate["high"] is None:
        return f"{rate['mean']:.3f}"
    return f"{rate['mean']:.3f} ({rate['low']:.3f} to {rate['high']:.3f})"


def _make_answers_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The first answers to the same prompts."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Sampled answers", title_justify="left")
    columns = ["prompt", *dict.fromkeys(row["when"] for row in rows)]
    for column in columns:
        table.add_column(column)
    by_time = [[row for row in rows if row["when"] == when] for when in columns[1:]]
    for same in list(zip(*by_time, strict=False))[:SHOWN_ANSWERS]:
        table.add_row(Text(_shorten(same[0]["prompt"], end=True)), *(Text(_shorten(row["text"])) for row in same))
    return table


def _shorten(text: str, *, end: bool = False) -> str:
    """One line of at most `SHOWN_CHARACTERS`; of a prompt, its end."""
    line = " ".join(text.split())
    if len(line) <= SHOWN_CHARACTERS:
        return line
    return f"…{line[-SHOWN_CHARACTERS:]}" if end else f"{line[:SHOWN_CHARACTERS]}…"
