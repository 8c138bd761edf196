"""Training over a fixed set of samples, and its report: what `ludic sft`, `train-rm` and `dpo` have
in common, and over preference pairs, the last two."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ludic.errors import ConfigError
from ludic.eval.picture import draw_margins, draw_reliability
from ludic.recipes.compose import config_hash
from ludic.recipes.epochs_schema import EpochsRecipe, PairsRecipe
from ludic.runs.base import DirectoryT, RunParts, TrainerT, TrainingRun, restore_best_weights
from ludic.runs.data.pairs import PairData
from ludic.runs.directory import PairsDirectory, Progress
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
from ludic.training import watchdog
from ludic.training.algorithm import RLAlgorithm
from ludic.training.backend.memory import memory_peaks
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.pair_batches import preference_batches
from ludic.training.batching.source import STOP_PATIENCE_S, BatchSourceBase
from ludic.training.classification_metrics import PreferenceMetrics
from ludic.training.config import TrainerConfig
from ludic.training.dpo_trainer import DPOTrainer
from ludic.training.rm_trainer import RMTrainer


@dataclass
class EpochsParts(RunParts):
    """The objects of a run over a fixed set of samples."""

    cfg: Any
    """The settings of its trainer, of the trainer's class."""
    steps: int
    """Batches in the whole run."""


RecipeT = TypeVar("RecipeT", bound=EpochsRecipe)
PartsT = TypeVar("PartsT", bound=EpochsParts)


class EpochsRun(TrainingRun[RecipeT, PartsT, DirectoryT]):
    """A run whose last phase goes over a fixed set of samples."""

    source: BatchSourceBase | None = None
    """The batches; None before training."""
    lines: Sequence[Mapping[str, Any]] = ()
    """The metrics of the training steps, while the run is reported."""

    async def train(self, trainer_class: Callable[..., TrainerT], source: BatchSourceBase, *, keys: list[str]) -> TrainerT:
        """Take the steps of the last phase that are left, or those until a stop, and save the
        model. Raises `Interrupted` after a stop.

        `trainer_class` makes the trainer, with the arguments of this kind of run bound; `keys` are
        the statistics of the plain lines.
        """
        parts, directory, phase = self.parts, self.directory, self.directory.last_phase
        self.source = source
        with (
            self.open_logger(phase, keys=keys, spark_key="loss", last_step=parts.steps) as logger,
            self.timer.phase("train"),
        ):
            trainer = self.make_trainer(
                phase,
                trainer_class,
                source,
                directory.checkpoints,
                cfg=parts.cfg,
                train_logger=logger,
                total_training_steps=max(1, parts.steps),
            )
            is_done = await self.take_steps(trainer, parts.steps)
            await trainer.ensure_checkpoint(patience_s=STOP_PATIENCE_S)
            if is_done:
                restore_best_weights(trainer, self.progress, note=self.screen.note)
            self.end_training()
        self.progress.steps = trainer.current_step
        self.save_model()
        if not is_done:
            self.interrupt()
        return trainer

    def conclude(self) -> str:
        """Write summary.json and the curves and print the report. Returns the summary as JSON."""
        self.lines = self.directory.read_steps(self.directory.last_phase)
        summary = self.build_summary()
        text = write_summary(self.directory, summary)
        if self.lines:
            self.draw(summary)
        self.show(summary)
        show_files(self.screen.console, self.directory.path, describe_files(self.directory, *self.list_files()))
        return text

    def build_summary(self) -> dict[str, Any]:
        """The content of summary.json."""
        recipe, progress = self.recipe, self.progress
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


@dataclass
class PairsParts(EpochsParts):
    """The objects of a run over preference pairs."""

    data: PairData
    algorithm: RLAlgorithm


PairsRecipeT = TypeVar("PairsRecipeT", bound=PairsRecipe)
PairsDirectoryT = TypeVar("PairsDirectoryT", bound=PairsDirectory)


class PairsRun(EpochsRun[PairsRecipeT, PairsParts, PairsDirectoryT]):
    """A run whose last phase goes over preference pairs."""

    accuracy: ClassVar[str]
    """The metric of a training step, in addition to the loss."""
    heldout_accuracy: ClassVar[str]
    """The metric of an evaluation."""
    margins: ClassVar[str]
    """What the picture of the margins has."""
    method: str
    """The title of the curves."""

    def write_pairs(self) -> None:
        """Write the pairs that a task drew, on rank 0; data of the user's are where they are."""
        if self.recipe.data is None:
            self.parts.data.write_missing_rows(self.directory.pairs, self.directory.heldout_pairs)

    async def train_on_pairs(self, trainer_class: Callable[..., TrainerT], description: str, keys: list[str]) -> TrainerT:
        """`train`, after a line that begins with `description`, and one if no pairs are held
        out."""
        parts, recipe = self.parts, self.recipe
        if not parts.data.heldout:
            self.screen.note("No pairs are held out; only training pairs are measured")
        size = f"{len(parts.data.units):,} {parts.data.unit}"
        self.screen.note(f"{description} {size}: {parts.steps} steps of {recipe.batch_size}")
        return await self.train(trainer_class, make_source(parts.data, recipe), keys=keys)

    def measure_heldout(self, trainer: DPOTrainer | RMTrainer, name: str) -> dict[str, float]:
        """The `eval_` metrics on the held-out pairs, which are also drawn. `name`: of the
        accuracy."""
        if not self.parts.data.heldout:
            return {}
        with self.timer.phase("evaluate"), watchdog.phase("evaluation"):
            measured = trainer.evaluate()
        if not self.directory.is_follower:
            self.draw_heldout(trainer.evaluator.metrics)  # type: ignore[union-attr]
        accuracy, pairs = measured[f"eval_{self.heldout_accuracy}"], measured["eval_num_pairs"]
        self.screen.note(f"{name} {accuracy:.4f} on {pairs:,.0f} pairs")
        return measured

    def draw_heldout(self, metrics: PreferenceMetrics) -> None:
        """Draw the reliability and the margins of the held-out pairs."""
        title = f"{self.directory.path.name}, held-out pairs"
        draw_reliability(self.directory.reliability, metrics, title=title)
        draw_margins(self.directory.margins, metrics, title=title)

    def list_facts(self) -> dict[str, Any]:
        pairs, seconds = (sum(line.get(key, 0.0) for line in self.lines) for key in ("train/total_pairs", "perf/step_s"))
        data, trained = self.parts.data, self.progress.steps * self.recipe.batch_size
        return {
            "bayes_accuracy": data.bayes_accuracy,
            "latent_accuracy": data.latent_accuracy,
            "pairs_per_s": round(pairs / seconds, 1) if seconds else None,
            "epochs": round(trained / len(data.units), 3),
            "data": data.counts(),
        }

    def draw(self, summary: Mapping[str, Any]) -> None:
        series = {name: [line[f"train/{name}"] for line in self.lines] for name in ("loss", self.accuracy)}
        measured = measured_by_step(self.directory, self.progress, summary, self.heldout_accuracy)
        title = f"{self.method}, seed {self.recipe.seed}"
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
            self.screen.console.print(
                f"[bold]Best possible accuracy[/]: {summary['bayes_accuracy']:.1%} on average over such pairs; the generator's own "
                f"quality predicts {summary['latent_accuracy']:.1%} of the labels of these pairs"
            )

    def show_pair_costs(self, summary: Mapping[str, Any]) -> None:
        """Seconds with the speed, padding and memory."""
        speed = f"; {summary['pairs_per_s']:,.0f} pairs a second in training" if summary["pairs_per_s"] else ""
        show_costs(self.screen.console, summary, speed=speed)


def make_source(data: PairData, recipe: PairsRecipe) -> ItemBatchSource:
    """Batches of `batch_size` training pairs, shuffled by the seed and shared by all ranks."""
    pairs = data.unit == "pairs"
    source = preference_batches(data.train, batch_size=recipe.batch_size, seed=recipe.seed, require_complete=pairs)
    source.unshard()  # all ranks share its batches
    return source


def count_steps(data: PairData, recipe: PairsRecipe) -> int:
    """Batches of the whole run: `steps`, or as many as `epochs` have."""
    return recipe.epochs * make_source(data, recipe).num_batches_per_epoch if recipe.steps is None else recipe.steps


def check_heldout(
    heldout: Sequence[Any], cfg: TrainerConfig, why_none: str = "raise heldout, or give heldout_data or heldout_split"
) -> None:
    """Raise `ConfigError` for evaluations during training without anything to measure on."""
    if not heldout and (cfg.eval_every_n_steps or cfg.eval_at_start):
        raise ConfigError(f"trainer.eval_every_n_steps needs held-out rows, and there are none: {why_none}")


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
        f"[bold]Data[/]: {data['pairs']:,} {data['unit']} of {data['tokens']:,} tokens, {data['pairs_cut']:,} of them cut to max_seq_len; "
        f"{data['heldout_pairs']:,} pairs held out"
    )
