"""Training over a fixed set of samples: what `ludic sft`, `train-rm` and `dpo` have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ludic.recipes.epochs_schema import EpochsRecipe
from ludic.runs.base import RunParts, TrainerT, TrainingRun
from ludic.runs.checkpoints import restore_best_weights
from ludic.runs.directory import RunDirectory
from ludic.runs.stop_request import Interrupted
from ludic.training.batching.source import STOP_PATIENCE_S, BatchSourceBase


class EpochsParts(RunParts, Protocol):
    """The parts of a run over a fixed set of samples."""

    cfg: Any
    steps: int


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
