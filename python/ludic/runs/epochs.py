"""Training over a fixed set of samples: what `ludic sft`, `train-rm` and `dpo` have in common, and
over preference pairs, the last two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ludic.errors import ConfigError
from ludic.eval.picture import draw_margins, draw_reliability
from ludic.recipes.epochs_schema import EpochsRecipe, PairsRecipe
from ludic.runs.base import RunParts, TrainerT, TrainingRun
from ludic.runs.checkpoints import restore_best_weights
from ludic.runs.data.pairs import PairData
from ludic.runs.directory import PairsDirectory, RunDirectory
from ludic.runs.stop_request import Interrupted
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.batching.pair_batches import preference_batches
from ludic.training.batching.source import STOP_PATIENCE_S, BatchSourceBase
from ludic.training.classification_metrics import PreferenceMetrics
from ludic.training.config import TrainerConfig


@dataclass
class EpochsParts(RunParts):
    """The objects of a run over a fixed set of samples."""

    cfg: Any
    """The settings of its trainer, of the trainer's class."""
    steps: int
    """Batches in the whole run."""


RecipeT = TypeVar("RecipeT", bound=EpochsRecipe)
PartsT = TypeVar("PartsT", bound=EpochsParts)
DirectoryT = TypeVar("DirectoryT", bound=RunDirectory)


class EpochsRun(TrainingRun[RecipeT, PartsT, DirectoryT]):
    """A run whose last phase goes over a fixed set of samples."""

    source: BatchSourceBase | None = None
    """The batches; None before training."""

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
            directory.write_progress(self.progress)
            raise Interrupted
        return trainer


@dataclass
class PairsParts(EpochsParts):
    """The objects of a run over preference pairs."""

    data: PairData
    algorithm: RLAlgorithm


PairsRecipeT = TypeVar("PairsRecipeT", bound=PairsRecipe)
PairsDirectoryT = TypeVar("PairsDirectoryT", bound=PairsDirectory)


class PairsRun(EpochsRun[PairsRecipeT, PairsParts, PairsDirectoryT]):
    """A run whose last phase goes over preference pairs."""

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
        self.screen.note(f"{description} {len(parts.data.train) // 2:,} pairs: {parts.steps} steps of {recipe.batch_size}")
        return await self.train(trainer_class, make_source(parts.data, recipe), keys=keys)

    def draw_heldout(self, metrics: PreferenceMetrics) -> None:
        """Draw the reliability and the margins of the held-out pairs."""
        title = f"{self.directory.path.name}, held-out pairs"
        draw_reliability(self.directory.reliability, metrics, title=title)
        draw_margins(self.directory.margins, metrics, title=title)


def make_source(data: PairData, recipe: PairsRecipe) -> ItemBatchSource:
    """Batches of `batch_size` training pairs, shuffled by the seed and shared by all ranks."""
    source = preference_batches(data.train, batch_size=recipe.batch_size, seed=recipe.seed)
    source.unshard()  # all ranks share its batches
    return source


def count_steps(data: PairData, recipe: PairsRecipe) -> int:
    """Batches of the whole run: `steps`, or as many as `epochs` have."""
    return recipe.epochs * make_source(data, recipe).num_batches_per_epoch if recipe.steps is None else recipe.steps


def check_heldout(data: PairData, cfg: TrainerConfig) -> None:
    """Raise `ConfigError` for evaluations during training without pairs to measure on."""
    if not data.heldout and (cfg.eval_every_n_steps or cfg.eval_at_start):
        raise ConfigError("trainer.eval_every_n_steps needs held-out pairs; raise heldout, or give heldout_data or heldout_split")
