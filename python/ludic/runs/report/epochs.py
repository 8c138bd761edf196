"""The reports of `ludic sft`, `train-rm` and `dpo`: summary.json, the curves of the training, and
the printed report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ludic.recipes.compose import config_hash
from ludic.runs.report.curve import write_picture
from ludic.runs.report.summary import (
    describe_files,
    find_algorithm,
    provenance,
    show_costs,
    show_files,
    sum_padding,
    sum_phases,
    write_summary,
)
from ludic.training.backend.memory import memory_peaks

if TYPE_CHECKING:
    from ludic.runs.directory import PairsDirectory, Progress
    from ludic.runs.epochs import EpochsRun


class EpochsReport(ABC):
    """The report of a run over a fixed set of samples."""

    def __init__(self, run: EpochsRun[Any, Any, Any]) -> None:
        self.run, self.directory, self.console = run, run.directory, run.screen.console
        self.lines = run.directory.read_steps(run.directory.last_phase)

    def conclude(self) -> str:
        """Write summary.json and the curves and print the report. Returns the summary as JSON."""
        summary = self.build_summary()
        text = write_summary(self.directory, summary)
        if self.lines:
            self.draw(summary)
        self.show(summary)
        show_files(self.console, self.directory.path, describe_files(self.directory, *self.list_files()))
        return text

    def build_summary(self) -> dict[str, Any]:
        """The content of summary.json."""
        recipe, progress = self.run.recipe, self.run.progress
        return {
            **provenance(progress, model=recipe.model, algorithm=find_algorithm(progress)),
            **self.list_facts(),
            "wall_s": round(progress.seconds.get("wall", 0.0), 2),
            "phases_s": sum_phases(progress.seconds, self.lines),
            "padding": sum_padding(self.lines),
            "memory": memory_peaks(),
            "steps": progress.steps,
            "early_stopping": progress.early_stopping,
            "seed": recipe.seed,
            "config_hash": config_hash(recipe, schedule_steps=progress.schedule_steps),
        }

    @abstractmethod
    def list_facts(self) -> dict[str, Any]:
        """What was measured, `epochs` and `data`."""

    @abstractmethod
    def draw(self, summary: Mapping[str, Any]) -> None:
        """Draw the curves of the training."""

    @abstractmethod
    def show(self, summary: Mapping[str, Any]) -> None:
        """Print the results and the costs."""

    @abstractmethod
    def list_files(self) -> tuple[dict[Path, str], dict[Path, str]]:
        """The pictures, and the rows that were trained on, each with its description."""


class PairsReport(EpochsReport):
    """The report of a run over preference pairs."""

    accuracy: ClassVar[str]
    """The metric of a training step, in addition to the loss."""
    heldout_accuracy: ClassVar[str]
    """The metric of an evaluation."""
    margins: ClassVar[str]
    """What the picture of the margins has."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The title of the curves."""

    def list_facts(self) -> dict[str, Any]:
        pairs, seconds = (sum(line.get(key, 0.0) for line in self.lines) for key in ("train/total_pairs", "perf/step_s"))
        data, trained = self.run.parts.data, self.run.progress.steps * self.run.recipe.batch_size
        return {
            "bayes_accuracy": data.bayes_accuracy,
            "latent_accuracy": data.latent_accuracy,
            "pairs_per_s": round(pairs / seconds, 1) if seconds else None,
            "epochs": round(trained / (len(data.train) // 2), 3),
            "data": data.counts(),
        }

    def draw(self, summary: Mapping[str, Any]) -> None:
        series = {name: [line[f"train/{name}"] for line in self.lines] for name in ("loss", self.accuracy)}
        measured = measured_by_step(self.directory, self.run.progress, summary, self.heldout_accuracy)
        title = f"{self.title}, seed {self.run.recipe.seed}"
        write_picture(self.directory.picture, series, marks={}, measured={f"held-out {self.accuracy}": measured}, title=title)

    def list_files(self) -> tuple[dict[Path, str], dict[Path, str]]:
        pictures = {
            self.directory.picture: "loss and accuracy of the training batches",
            self.directory.reliability: "how often a stated probability comes true",
            self.directory.margins: self.margins,
        }
        rows = {
            self.directory.pairs: "the pairs that were trained on",
            self.directory.heldout_pairs: "the pairs that were measured",
        }
        return pictures, rows

    def show_best_accuracy(self, summary: Mapping[str, Any]) -> None:
        """Of generated pairs, whose labels are drawn by a known rule; nothing of other data."""
        if summary["bayes_accuracy"] is not None:
            self.console.print(
                f"[bold]Best possible accuracy[/]: {summary['bayes_accuracy']:.1%} on average over such pairs; the generator's own "
                f"quality predicts {summary['latent_accuracy']:.1%} of the labels of these pairs"
            )

    def show_pair_costs(self, summary: Mapping[str, Any]) -> None:
        """Seconds with the speed, padding and memory."""
        speed = f"; {summary['pairs_per_s']:,.0f} pairs a second in training" if summary["pairs_per_s"] else ""
        show_costs(self.console, summary, speed=speed)


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


def describe_data(data: Mapping[str, Any]) -> str:
    """The counts of pairs and tokens."""
    return (
        f"[bold]Data[/]: {data['pairs']:,} pairs of {data['tokens']:,} tokens, {data['pairs_cut']:,} of them cut to max_seq_len; "
        f"{data['heldout_pairs']:,} held out"
    )
