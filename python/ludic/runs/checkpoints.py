"""The checkpoints of a run: which one a phase resumes from, and cutting the logs back to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ludic.errors import CheckpointError
from ludic.files.atomic import read_json
from ludic.files.checkpoints import STATE
from ludic.runs.directory import Progress, RunDirectory
from ludic.training import ranks
from ludic.training.checkpoint import CheckpointConfig, CheckpointManager
from ludic.training.loop.schedule import depends_on_total
from ludic.training.trainer import Trainer


def read_kept_metadata(checkpoints: Path) -> list[dict[str, Any]]:
    """The metadata of the checkpoints in the folder, without those that cannot be read."""
    states = []
    for path in checkpoints.glob(f"step_*/{STATE}"):
        with suppress(CheckpointError, OSError):
            states.append(read_json(path))
    return states


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
