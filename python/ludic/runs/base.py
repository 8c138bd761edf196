"""The base class of all training runs: progress, checkpoints, logs and model in a folder, a stop on
request, and the resume: the checkpoint of a phase from which it goes on, and the cut of the logs
back to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, cast

from ludic.errors import StopRequested
from ludic.models.loading import compare_processor, find_whole_model
from ludic.models.lora import describe_trained_share
from ludic.models.saving import save_missing_base, save_policy, write_card
from ludic.models.wrappers import has_adapters
from ludic.recipes.build import build_callbacks
from ludic.recipes.epochs_schema import EpochsRecipe
from ludic.recipes.model import add_adapters, is_shared_out, recomputes_activations, serves_base
from ludic.recipes.schema import Recipe
from ludic.recipes.sections import parse_steps
from ludic.runs.directory import DONE, Progress, RunDirectory
from ludic.runs.loggers import Screen, run_logger
from ludic.runs.model_card import try_card
from ludic.runs.shared_model import GatheredEvaluator, SharedModel, describe_precision
from ludic.runs.stop_request import Interrupted, StopRequest
from ludic.tasks import EpisodicTask
from ludic.training import ranks, watchdog
from ludic.training.batching.shared_batches import SharedBatches
from ludic.training.callbacks import Callback
from ludic.training.checkpoint import CheckpointConfig, CheckpointManager
from ludic.training.evaluators.protocol import Evaluator
from ludic.training.loggers import TrainingLogger
from ludic.training.loop.profiler import Profiler
from ludic.training.loop.schedule import depends_on_total
from ludic.training.loop.step_record import PhaseTimer
from ludic.training.rng import reseed_for_rank, seed_phase
from ludic.training.trainer import Trainer

BATCH_PATIENCE_S = 8.0
"""How long several ranks wait for a batch after a stop was requested."""


@dataclass
class RunParts:
    """The objects of a run. They are built before anything is written, so that a wrong setting or
    row leaves no folder behind."""

    model: Any
    tokenizer: Any


RecipeT = TypeVar("RecipeT", bound=Recipe | EpochsRecipe)
PartsT = TypeVar("PartsT", bound=RunParts)
DirectoryT = TypeVar("DirectoryT", bound=RunDirectory)
TrainerT = TypeVar("TrainerT", bound=Trainer)


class TrainingRun(ABC, Generic[RecipeT, PartsT, DirectoryT]):
    """Runs a recipe in its folder. A subclass defines the phases and their order.

    The progress is written when a phase ends, and by the caller when `play` ends or raises.
    """

    task: EpisodicTask | None = None
    """The task; None in a run without episodes."""
    is_placed = False
    """Whether a launcher has started this process, and starts the actors."""

    def __init__(self, recipe: RecipeT, parts: PartsT, directory: DirectoryT, screen: Screen) -> None:
        self.recipe, self.parts, self.directory, self.screen = recipe, parts, directory, screen
        self.stop = StopRequest(screen.note, ranks.current_rendezvous())
        self.progress = Progress(**ranks.ask_rank_0("reading the progress", lambda: asdict(directory.read_progress())))
        self.timer = PhaseTimer(self.progress.seconds)
        """Wall seconds of each phase, summed over all processes that worked on the run."""
        section = replace(recipe.sharding, activation_checkpointing=recomputes_activations(recipe))
        self.shared = SharedModel(section, recipe.trainer.model_device) if is_shared_out(section) else None
        """What the ranks train instead of `parts.model`, if they share it out."""
        self.trainer: Trainer | None = None
        """The trainer of the present or last phase."""
        self.callbacks: Sequence[Callback] = ()
        """Callbacks in addition to the recipe's, for all phases but the warm-up."""
        ranks.ask_rank_0("comparing the processor of images", self._check_processor)
        if precision := describe_precision(section):
            screen.note(precision)
        source = None if isinstance(recipe, Recipe) and serves_base(recipe) else recipe.model
        ranks.ask_rank_0("saving the base", lambda: save_missing_base(parts.model, parts.tokenizer, source, directory.base))

    def _check_processor(self) -> None:
        """Record the processor of images. Raises CheckpointError if the run began with another."""
        if (now := compare_processor(self.parts.model, self.progress.images)) is not None:
            self.progress.images = now
            self.directory.write_progress(self.progress)

    @property
    def measured(self) -> Sequence[str] | None:
        """The metrics of an evaluation; None if they are not known before one."""
        return None

    @property
    def title(self) -> str:
        """The name of the run in its first line of output."""
        return self.directory.command

    @classmethod
    @abstractmethod
    def build(cls, recipe: RecipeT, note: Callable[[str], None]) -> PartsT:
        """The parts of the run. All random generators are seeded first (`seed_everything`), and all
        data is read here, before a folder is made. `note` receives remarks on settings that cannot
        be followed."""

    async def play(self) -> None:
        """Run the phases that are left. Raises `Interrupted` after a stop."""
        try:
            if self.progress.phase != DONE:
                await self.play_phases()
        finally:
            if self.task is not None:
                await self.task.aclose()
                if self.task.execution_s is not None:
                    seconds = self.progress.seconds
                    seconds["execution"] = seconds.get("execution", 0.0) + self.task.execution_s

    @abstractmethod
    async def play_phases(self) -> None:
        """Run the phases from `progress.phase` on; the last thing is `end_phase(DONE)`."""

    @abstractmethod
    def conclude(self) -> str:
        """Write the summary and the plots, show the report, and return the summary as JSON."""

    def end_phase(self, following: str) -> None:
        """Record that the phase `following` is next; a resumed run starts with it. At the end the
        model cards are written."""
        self.progress.phase = following
        self.directory.write_progress(self.progress)
        if following != DONE:
            return
        with ranks.rank_0_alone("writing the model cards"):
            for folder, is_adapter in ((self.directory.model, False), (self.directory.adapter, True)):
                if ranks.rank() == 0 and folder.is_dir():
                    write_card(folder, self._make_card(is_adapter))

    @property
    def adapted_base(self) -> str | None:
        """The model that the adapters adapt; None if it is in the run's folder `base`."""
        return find_whole_model(self.recipe.model)

    def save_model(self) -> None:
        """Write model and tokenizer in Hugging Face layout, on rank 0. What a phase trained must be
        in `parts.model`: see `end_training`."""
        base, parts = self.adapted_base, self.parts
        with watchdog.phase("save"):
            ranks.ask_rank_0(
                "saving the model",
                lambda: save_policy(parts.model, parts.tokenizer, self.directory.model, base=base, make_card=self._make_card),
            )

    def _make_checkpoint_card(self, step: int) -> str | None:
        state = replace(self.progress, steps=step, before=None, after=None)
        return try_card(self.directory.path.name, state, is_adapter=has_adapters(self.parts.model))

    def _make_card(self, is_adapter: bool) -> str | None:
        return try_card(self.directory.path.name, self.progress, is_adapter=is_adapter)

    def open_logger(
        self, phase: str, *, keys: list[str], spark_key: str, last_step: int
    ) -> AbstractContextManager[TrainingLogger | None]:
        """The logger of a phase, on rank 0. Plain lines show the statistics `keys`; `spark_key` is
        drawn."""
        if self.directory.is_follower:
            return nullcontext()
        return run_logger(self.recipe, self.directory, self.screen, phase, keys=keys, spark_key=spark_key, last_step=last_step)

    def make_trainer(
        self, phase: str, trainer_class: Callable[..., TrainerT], source: Any, checkpoints: Path, **options: Any
    ) -> TrainerT:
        """The trainer of a phase, loaded from its last checkpoint if there is one. `options` are
        more arguments of `trainer_class`.

        With several ranks, `source` is rank 0's, and may be None on the others. All ranks
        get its batches and divide them."""
        seed_phase(self.recipe.seed, phase)
        if ranks.rank() > 0:
            reseed_for_rank(ranks.rank())
        if recomputes_activations(self.recipe) and self.shared is None:
            options = {**options, "enable_gradient_checkpointing": True}
        kept = self.recipe.checkpoint
        places = CheckpointConfig(
            checkpoints,
            every_n_steps=kept.every_n_steps,
            max_to_keep=kept.max_to_keep,
            layout=cast(Any, kept.layout),  # checked when the recipe was
            static_files=kept.static_files,
        )
        manager = CheckpointManager(
            places, tokenizer=self.parts.tokenizer, model=self.parts.model, card=self._make_checkpoint_card
        )
        own = (
            () if phase == "warm_up" else (*build_callbacks(self.recipe.callbacks, console=self.screen.console), *self.callbacks)
        )
        if ranks.is_distributed():  # after a stop all ranks end before the same batch
            patience_s = self.recipe.ranks.generation_s
            source = SharedBatches(source, stop=self._check_others, patience_s=patience_s, stop_patience_s=BATCH_PATIENCE_S)
        trainer = trainer_class(
            model=self.parts.model if self.shared is None else self.shared.shard(self.parts.model),
            batch_source=source,
            should_stop=None if ranks.is_distributed() else lambda: bool(self.stop),
            checkpointer=manager,
            resume_from=ranks.ask_rank_0("finding the newest checkpoint", lambda: find_latest_checkpoint(manager)),
            callbacks=own,
            profiler=self._make_profiler(phase),
            **options,
        )
        self.trainer = trainer
        keep_schedule(trainer, options.get("total_training_steps"), self.progress, note=self.screen.note)
        if trainer.current_step:
            self.end_training()
        if not self.directory.is_follower:
            rewind_logs(self.directory, phase, trainer, note=self.screen.note)
        return trainer

    def _make_profiler(self, phase: str) -> Profiler | None:
        """The profiler of the last phase that the run has."""
        steps, recipe = parse_steps(self.recipe.profile), self.recipe
        is_last = phase == self.directory.last_phase or (isinstance(recipe, Recipe) and not recipe.steps)
        if steps is None or not is_last:
            return None
        first, last = steps
        return Profiler(first, last, folder=self.directory.profile, note=self.screen.note)

    def evaluator(self, inner: Evaluator | None) -> Evaluator | None:
        """`inner`, which measures `parts.model`; while that is shared out, it gets the trained
        weights first."""
        return inner if inner is None or self.shared is None else GatheredEvaluator(inner, self.shared, self.parts.model)

    def adapt(self) -> None:
        """Add the recipe's adapters, unless the model has them."""
        recipe, parts = self.recipe, self.parts
        if recipe.lora.rank:
            if not has_adapters(parts.model):
                parts.model = add_adapters(parts.model, recipe, seed=recipe.seed)
            self.screen.note(describe_trained_share(parts.model))

    async def measure_on_rank_0(self, doing: str, measure: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """What `measure` returns on rank 0. All ranks return it."""
        with self.timer.phase("evaluate"), watchdog.phase("evaluation"), ranks.rank_0_alone(doing) as shared:
            if ranks.rank() == 0:
                shared.append(await measure())
        measured: dict[str, Any] = shared[0]
        return measured

    def end_training(self) -> None:
        """Have the trained weights in `parts.model`, on rank 0 if the ranks share it out."""
        if self.shared is not None:
            self.shared.gather_to_rank0(self.parts.model)

    def _check_others(self) -> bool:
        """Whether a stop was requested. Raises RankError once another rank has failed."""
        ranks.raise_if_failed()
        return bool(self.stop)

    def interrupt(self) -> NoReturn:
        """Save the progress and end the run, which was asked to stop."""
        self.directory.write_progress(self.progress)
        raise Interrupted

    def is_stopped(self) -> bool:
        """Whether the run was asked to stop; the same on all ranks, which all call it."""
        return ranks.ask_rank_0("asking whether to stop", lambda: bool(self.stop))

    async def take_steps(self, trainer: Trainer, steps: int) -> bool:
        """Train until step `steps`. False if a requested stop left steps undone; early stopping
        and callbacks leave none."""
        try:
            await trainer.train(steps - trainer.current_step)
        except StopRequested:
            return False
        stop = trainer.callbacks.stop
        self.progress.stopped_by = None if stop is None else asdict(stop)
        if stop is not None:
            self.screen.note(f"Stopped at step {stop.step} of {steps} by {stop.callback}: {stop.reason}")
        return True


def find_latest_checkpoint(manager: CheckpointManager) -> str | None:
    """The newest undamaged checkpoint; None without any. The run's folder is locked, so what an
    earlier life left unfinished is deleted."""
    manager.clear_leftovers()
    try:
        return str(manager.find())
    except FileNotFoundError:
        return None


def has_checkpoint(checkpoints: Path) -> bool:
    """Whether the folder has any checkpoint, damaged or not. No file is read. All ranks call it,
    and get what rank 0 sees."""
    return ranks.ask_rank_0("looking for checkpoints", CheckpointManager(CheckpointConfig(checkpoints)).has_any)


def rewind_logs(directory: RunDirectory, phase: str, trainer: Trainer, *, note: Callable[[str], None]) -> None:
    """Remove what the run logged of the phase after the trainer's checkpoint, so that each step is
    logged once. Without a checkpoint the whole phase is removed."""
    step = trainer.current_step
    lost = directory.cut_metrics(phase, step, evaluated=trainer.evaluated_step == step)
    if step == 0:
        for log in (directory.rollouts, directory.token_logps, directory.failed_episodes):
            log.unlink(missing_ok=True)
    if lost:
        since = f"the checkpoint of step {step}" if step else "the start of the phase, because there is no checkpoint"
        note(f"{lost} steps of {phase} are repeated, from {since}")


def keep_schedule(trainer: Trainer, steps: int | None, progress: Progress, *, note: Callable[[str], None]) -> None:
    """Of a run of `steps` steps that was begun for fewer, and whose schedule of the learning rate
    depends on their number: record in `progress` that the checkpoint's schedule is kept, and stays
    at its end value."""
    kept = trainer.schedule.total_steps
    if steps is None or not trainer.current_step or kept >= steps or not depends_on_total(trainer.cfg):
        return
    progress.schedule_steps = kept
    last = trainer.cfg.lr * trainer.schedule.factor(kept + 1)
    note(
        f"The run was begun for {kept} steps and keeps their {trainer.cfg.lr_scheduler_type} schedule: from step {kept + 1} on the "
        f"learning rate is {last:.3g}"
    )


def restore_best_weights(trainer: Trainer, progress: Progress, *, note: Callable[[str], None]) -> None:
    """With early stopping, load the weights of the best evaluation and record its step in
    `progress`. Without early stopping, do nothing."""
    step, stopping = trainer.restore_best(), trainer.early_stopping
    if step is None:
        return
    metric = stopping.cfg.early_stopping_metric
    progress.early_stopping = {"stopped": stopping.stopped, "kept_step": step, "metric": metric, "best": stopping.best}
    ended = f"Stopped early at step {trainer.current_step}" if stopping.stopped else f"Ended at step {trainer.current_step}"
    note(f"{ended}; the model has the weights of step {step}, where {metric} was best ({stopping.best:.4f})")
