"""What a checkpoint keeps of a run besides weights and optimizer, so that a resumed run goes on as
if it had not ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ludic.training.batching.source import BatchSourceBase
from ludic.training.loop.early_stopping import EarlyStopping
from ludic.training.loop.schedule import RunSchedule
from ludic.training.rng import rng_state, set_rng_state


class ResumableRun(Protocol):
    """The members of a trainer that a checkpoint keeps."""

    schedule: RunSchedule
    early_stopping: EarlyStopping
    last_eval: dict[str, float]
    evaluated_step: int | None

    @property
    def current_step(self) -> int: ...


def run_state(run: ResumableRun, source: BatchSourceBase) -> dict[str, Any]:
    """Schedule, early stopping, last evaluation and its step, random generators, and the state of
    the batch source if it has one."""
    state: dict[str, Any] = {
        "scheduler_state_dict": run.schedule.state_dict(run.current_step),
        **evaluation_state(run),
        "rng_state": rng_state(),
    }
    source_state = source.state_dict()
    return state if source_state is None else {**state, "batch_source": source_state}


def evaluation_state(run: ResumableRun) -> dict[str, Any]:
    """The part of `run_state` that an evaluation changes."""
    return {
        "early_stopping": run.early_stopping.state_dict(),
        "last_eval": run.last_eval,
        "evaluated_step": run.evaluated_step,
    }


def restore_run(run: ResumableRun, source: BatchSourceBase, metadata: Mapping[str, Any]) -> None:
    """Go back to where `run_state` was taken. What an older checkpoint lacks stays as it is."""
    if "scheduler_state_dict" in metadata:
        run.schedule.resume(int(metadata["scheduler_state_dict"]["total_steps"]))
    if "early_stopping" in metadata:
        run.early_stopping.load_state_dict(metadata["early_stopping"])
    run.last_eval = dict(metadata.get("last_eval", {}))
    run.evaluated_step = metadata.get("evaluated_step")
    if "batch_source" in metadata:
        source.load_state_dict(metadata["batch_source"])
    if "rng_state" in metadata:
        set_rng_state(metadata["rng_state"])
