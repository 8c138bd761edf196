"""The steps of `ludic sft` and `ludic train-rm`, over data that is there already: until the end
or a stop, and from a checkpoint on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ludic.cli.training_command import TrainingRun
from ludic.errors import StopRequested
from ludic.models.loading import find_whole_model
from ludic.models.saving import save_missing_base, save_policy
from ludic.recipes.build import seed_phase
from ludic.runs.continuation import end_with_best, keep_checkpoint, latest_checkpoint, set_back
from ludic.runs.stopping import Interrupted, StoppableSource
from ludic.runs.tracking import run_logger
from ludic.training.batching.epochs import ItemBatchSource
from ludic.training.checkpoint import CheckpointConfig
from ludic.training.trainer import Trainer

T = TypeVar("T", bound=Trainer)


async def take_steps(run: TrainingRun, trainer_of: Callable[..., T], source: ItemBatchSource, *, keys: list[str]) -> T:
    """All steps of `run.parts` that are left, or those until a stop; the model is kept either way.
    Raises `Interrupted` after a stop.

    `trainer_of` is the class of the trainer, with what this kind of run gives it; `keys` are what
    the plain lines show.
    """
    recipe, parts, directory, phase = run.recipe, run.parts, run.directory, run.directory.first_phase
    save_missing_base(parts.model, recipe.model, directory.base)
    with (
        run_logger(recipe, directory, run.screen, phase, keys=keys, spark_key="loss", last_step=parts.steps) as logger,
        run.watch.measure("train"),
    ):
        options: dict[str, Any] = {
            "model": parts.model,
            "batch_source": StoppableSource(source, run.stop),
            "cfg": parts.cfg,
            "checkpoint_config": CheckpointConfig(
                directory.checkpoints,
                every_n_steps=recipe.checkpoint.every_n_steps,
                max_to_keep=recipe.checkpoint.max_to_keep,
            ),
            "resume_from": latest_checkpoint(directory.checkpoints),
            "train_logger": logger,
            "total_training_steps": max(1, parts.steps),
        }
        seed_phase(recipe.seed, phase)
        trainer, is_stopped = trainer_of(**options), False
        set_back(directory, phase, trainer, note=run.screen.note)
        try:
            await trainer.train(parts.steps - trainer.current_step)
        except StopRequested:  # steps are left, and no evaluation has ended them early
            is_stopped = True
        keep_checkpoint(trainer)
        if not is_stopped:
            end_with_best(trainer, run.progress, note=run.screen.note)
    run.progress.steps = trainer.current_step
    save_policy(parts.model, parts.tokenizer, directory.model, base=find_whole_model(recipe.model))
    if is_stopped:
        directory.write_progress(run.progress)
        raise Interrupted
    return trainer
