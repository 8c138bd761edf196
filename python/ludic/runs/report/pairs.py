"""What the reports of `ludic train-rm` and `ludic dpo` have in common: the facts of a run over
preference pairs, and the lines that show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ludic.runs.report.costs import show_costs, sum_padding, sum_phases
from ludic.training.backend.memory import memory_peaks

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.runs.directory import PairsDirectory, Progress
    from ludic.runs.pairs import PairsRun


def summarize(run: PairsRun[Any, Any, Any], lines: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """What summary.json says of the pairs and of the steps on them, whose `lines` these are."""
    data, progress = run.parts.data, run.progress
    pairs = sum(line.get("train/total_pairs", 0.0) for line in lines)
    seconds = sum(line.get("perf/step_s", 0.0) for line in lines)
    return {
        "bayes_accuracy": data.bayes_accuracy,
        "latent_accuracy": data.latent_accuracy,
        "wall_s": round(progress.seconds.get("wall", 0.0), 2),
        "phases_s": sum_phases(progress.seconds, lines),
        "pairs_per_s": round(pairs / seconds, 1) if seconds else None,
        "padding": sum_padding(lines),
        "memory": memory_peaks(),
        "steps": progress.steps,
        "early_stopping": progress.early_stopping,
        "epochs": round(progress.steps * run.recipe.batch_size / (len(data.train) // 2), 3),
    }


def measured_by_step(
    directory: PairsDirectory, progress: Progress, summary: Mapping[str, Any], name: str
) -> list[tuple[float, float]]:
    """(step, held-out metric `name`) of every evaluation: during training, and of the final
    model."""
    key = f"eval/{name}"
    values = {line["step"]: line[key] for line in directory.read_metrics(directory.last_phase) if key in line}
    if f"eval_{name}" in summary:
        final = progress.early_stopping or {"kept_step": progress.steps}
        values[final["kept_step"]] = summary[f"eval_{name}"]
    return sorted(values.items())


def show_best_accuracy(console: Console, summary: Mapping[str, Any]) -> None:
    """Of generated pairs, whose labels are drawn by a known rule; nothing of other data."""
    if summary["bayes_accuracy"] is not None:
        console.print(
            f"[bold]Best possible accuracy[/]: {summary['bayes_accuracy']:.1%} on average over such pairs; the generator's own quality "
            f"predicts {summary['latent_accuracy']:.1%} of the labels of these pairs",
            highlight=False,
        )


def describe_data(data: Mapping[str, Any]) -> str:
    """The counts of pairs and tokens."""
    return (
        f"[bold]Data[/]: {data['pairs']:,} pairs of {data['tokens']:,} tokens, {data['pairs_cut']:,} of them cut to max_seq_len; "
        f"{data['heldout_pairs']:,} held out"
    )


def show_pair_costs(console: Console, summary: Mapping[str, Any]) -> None:
    """Seconds with the speed, padding and memory."""
    speed = f"; {summary['pairs_per_s']:,.0f} pairs a second in training" if summary["pairs_per_s"] else ""
    show_costs(console, summary, speed=speed)


def describe_pictures(directory: PairsDirectory, *, margins: str) -> dict[Any, str]:
    """The plots of a run. `margins`: whose differences the one of the margins has."""
    return {
        directory.picture: "loss and accuracy of the training batches",
        directory.reliability: "how often a stated probability comes true",
        directory.margins: margins,
    }


def describe_rows(directory: PairsDirectory) -> dict[Any, str]:
    """The files with pairs."""
    return {
        directory.pairs: "the pairs that were trained on",
        directory.heldout_pairs: "the pairs that were measured",
    }
