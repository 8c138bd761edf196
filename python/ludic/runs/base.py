"""What every training run does: it keeps its progress, checkpoints, logs and model in a folder,
stops when it is asked to, and resumes from there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ludic.errors import StopRequested
from ludic.models.loading import find_whole_model
from ludic.models.saving import save_missing_base, save_policy
from ludic.recipes.epochs_schema import EpochsRecipe
from ludic.recipes.schema import Recipe
from ludic.runs.checkpoints import find_latest_checkpoint, rewind_logs
from ludic.runs.directory import DONE, RunDirectory
from ludic.runs.screen import Screen
from ludic.runs.seeding import seed_phase
from ludic.runs.stop_request import StoppableSource, StopRequest
from ludic.runs.tracking import run_logger
from ludic.training.checkpoint import CheckpointConfig
from ludic.training.loggers import TrainingLogger
from ludic.training.loop.timings import PhaseTimer
from ludic.training.trainer import Trainer


class RunParts(Protocol):
    """The objects that a recipe was turned into."""

    model: Any
    tokenizer: Any


RecipeT = TypeVar("RecipeT", bound=Recipe | EpochsRecipe)
PartsT = TypeVar("PartsT", bound=RunParts)
DirectoryT = TypeVar("DirectoryT", bound=RunDirectory)
TrainerT = TypeVar("TrainerT", bound=Trainer)


class TrainingRun(ABC, Generic[RecipeT, PartsT, DirectoryT]):
    """A recipe that is run in its folder: the phases of a subclass, in order.

    The progress is written when a phase ends, and by the caller when `play` ends or raises.
    """

    def __init__(self, recipe: RecipeT, parts: PartsT, directory: DirectoryT, screen: Screen, stop: StopRequest) -> None:
        self.recipe, self.parts, self.directory, self.screen, self.stop = recipe, parts, directory, screen, stop
        self.progress = directory.read_progress()
        self.timer = PhaseTimer(self.progress.seconds)
        """Wall seconds by phase of the run, over all processes that worked at it."""
        save_missing_base(parts.model, recipe.model, directory.base)

    @property
    def title(self) -> str:
        """What the run is called in its first line."""
        return self.directory.command

    async def play(self) -> None:
        """Run the phases that are left. Raises `Interrupted` after a stop."""
        if self.progress.phase != DONE:
            await self.play_phases()

    @abstractmethod
    async def play_phases(self) -> None:
        """Run the phases from `progress.phase` on; the last thing is `end_phase(DONE)`."""

    def end_phase(self, following: str) -> None:
        """Write that `following` is next: a run that is resumed starts with it."""
        self.progress.phase = following
        self.directory.write_progress(self.progress)

    def save_model(self) -> None:
        """Write model and tokenizer in Hugging Face layout."""
        save_policy(self.parts.model, self.parts.tokenizer, self.directory.model, base=find_whole_model(self.recipe.model))

    def open_logger(
        self, phase: str, *, keys: list[str], spark_key: str, last_step: int
    ) -> AbstractContextManager[TrainingLogger]:
        """The logger of a phase. `keys` are what the plain lines show, `spark_key` is drawn."""
        return run_logger(self.recipe, self.directory, self.screen, phase, keys=keys, spark_key=spark_key, last_step=last_step)

    def make_trainer(
        self, phase: str, trainer_class: Callable[..., TrainerT], source: Any, checkpoints: Path, **options: Any
    ) -> TrainerT:
        """The trainer of a phase, at its last checkpoint if there is one. `options` go to
        `trainer_class`, beside what all phases have in common."""
        seed_phase(self.recipe.seed, phase)
        trainer = trainer_class(
            model=self.parts.model,
            batch_source=StoppableSource(source, self.stop),
            checkpoint_config=CheckpointConfig(
                checkpoints,
                every_n_steps=self.recipe.checkpoint.every_n_steps,
                max_to_keep=self.recipe.checkpoint.max_to_keep,
            ),
            resume_from=find_latest_checkpoint(checkpoints),
            **options,
        )
        rewind_logs(self.directory, phase, trainer, note=self.screen.note)
        return trainer

    async def take_steps(self, trainer: Trainer, steps: int) -> bool:
        """Train until step `steps`. False if a stop was asked for while steps were left; early
        stopping leaves none."""
        try:
            await trainer.train(steps - trainer.current_step)
        except StopRequested:
            return False
        return True
