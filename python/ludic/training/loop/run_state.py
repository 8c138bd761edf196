"""The state of a run that a checkpoint has besides weights and optimizer, so that a resumed run
continues as if it had not ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ludic.training.batching.source import BatchSourceBase
from ludic.training.loop.evaluations import Evaluations
from ludic.training.loop.schedule import RunSchedule
from ludic.training.rng import rng_state, set_rng_state


class ResumableRun(Protocol):
    """The members of a trainer that a checkpoint saves."""

    schedule: RunSchedule
    evaluations: Evaluations

    @property
    def current_step(self) -> int: ...


def run_state(run: ResumableRun, source: BatchSourceBase) -> dict[str, Any]:
    """The state of the schedule, early stopping, the last evaluation, the random generators, and of
    the batch source if it has one."""
    state: dict[str, Any] = {
        "scheduler_state_dict": run.schedule.state_dict(run.current_step),
        **run.evaluations.state_dict(),
        "rng_state": rng_state(),
    }
    source_state = source.state_dict()
    return state if source_state is None else {**state, "batch_source": source_state}


def restore_run(run: ResumableRun, source: BatchSourceBase, metadata: Mapping[str, Any]) -> None:
    """Restore the state in `metadata`. What a checkpoint of an older version lacks stays as it
    is."""
    if "scheduler_state_dict" in metadata:
        run.schedule.resume(int(metadata["scheduler_state_dict"]["total_steps"]))
    run.evaluations.load_state_dict(metadata)
    if "batch_source" in metadata:
        source.load_state_dict(metadata["batch_source"])
    if "rng_state" in metadata:
        set_rng_state(metadata["rng_state"])
