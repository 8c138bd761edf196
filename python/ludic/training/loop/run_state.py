"""What a checkpoint keeps of a run besides weights and optimizer, so that a resumed run is the
run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ludic.training.loop.schedule import LearningRateSchedule
from ludic.training.rng import rng_state, set_rng_state

if TYPE_CHECKING:
    from ludic.training.trainer import Trainer


def run_state(trainer: Trainer) -> dict[str, Any]:
    """Schedule, random generators, early stopping, last evaluation and its step, and the batch
    source's state if it has one."""
    state: dict[str, Any] = {
        "scheduler_state_dict": trainer.schedule.state_dict(trainer.current_step),
        **evaluation_state(trainer),
        "rng_state": rng_state(),
    }
    if hasattr(trainer.batch_source, "state_dict"):
        state["batch_source"] = trainer.batch_source.state_dict()
    return state


def evaluation_state(trainer: Trainer) -> dict[str, Any]:
    """What an evaluation changes of it."""
    return {
        "early_stopping": trainer.early_stopping.state_dict(),
        "last_eval": trainer.last_eval,
        "evaluated_step": trainer.evaluated_step,
    }


def restore_run(trainer: Trainer, metadata: Mapping[str, Any]) -> None:
    """Go back to where `run_state` was taken. What an older checkpoint lacks stays as it is."""
    if "scheduler_state_dict" in metadata:
        total = int(metadata["scheduler_state_dict"]["total_steps"])
        trainer.resume_schedule(LearningRateSchedule.from_config(trainer.cfg, total))
    if "early_stopping" in metadata:
        trainer.early_stopping.load_state_dict(metadata["early_stopping"])
    trainer.last_eval = dict(metadata.get("last_eval", {}))
    trainer.evaluated_step = metadata.get("evaluated_step")
    if "batch_source" in metadata and hasattr(trainer.batch_source, "load_state_dict"):
        trainer.batch_source.load_state_dict(metadata["batch_source"])
    if "rng_state" in metadata:
        set_rng_state(metadata["rng_state"])
