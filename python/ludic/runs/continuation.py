"""Where a phase of a run goes on: its last checkpoint, and logs that end with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ludic.runs.directory import Progress, RunDirectory
from ludic.training.checkpoint import CheckpointConfig, CheckpointManager
from ludic.training.trainer import Trainer


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """Where `CheckpointManager` finds the newest checkpoint, if there is any."""
    try:
        return CheckpointManager(CheckpointConfig(checkpoints)).find()
    except FileNotFoundError:
        return None


def keep_checkpoint(trainer: Trainer) -> None:
    """One of the trainer's step, unless it is there."""
    assert trainer.checkpointer is not None
    if not trainer.checkpointer.holds(trainer.current_step):
        trainer.save_checkpoint()


def set_back(directory: RunDirectory, phase: str, trainer: Trainer, *, note: Callable[[str], None]) -> None:
    """Leave in the run's logs what the trainer's checkpoint has seen of the phase, without one
    nothing: each step stands there once."""
    step = trainer.current_step
    lost = directory.cut_metrics(phase, step, evaluated=trainer.evaluated_step == step)
    if step == 0:
        directory.rollouts.unlink(missing_ok=True)
    if lost:
        since = f"the checkpoint of step {step}" if step else "the beginning of the phase, since there is no checkpoint"
        note(f"{lost} steps of {phase} are done again, from {since}")


def end_with_best(trainer: Trainer, progress: Progress, *, note: Callable[[str], None]) -> None:
    """Of a run with a patience: its weights become those of the best evaluation, and its
    progress tells which that was."""
    step, stopping = trainer.restore_best(), trainer.early_stopping
    if step is None:
        return
    metric = stopping.cfg.early_stopping_metric
    progress.early_stopping = {"stopped": stopping.stopped, "kept_step": step, "metric": metric, "best": stopping.best}
    ended = f"Stopped early at step {trainer.current_step}" if stopping.stopped else f"Ended at step {trainer.current_step}"
    note(f"{ended}; the model is that of step {step}, where {metric} was best ({stopping.best:.4f})")
