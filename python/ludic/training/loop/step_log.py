"""The log line of each training step, and what the controllers see of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ludic.training.config import TrainerConfig
from ludic.training.loggers.base import TrainingLogger
from ludic.training.loop.control import Control
from ludic.training.loop.outputs import log_safely
from ludic.training.loop.rank_times import RankTimes
from ludic.training.loop.schedule import RunSchedule
from ludic.training.loop.step_record import StepRecord
from ludic.training.loop.timings import TimeLeft
from ludic.training.preparation import Prepared
from ludic.training.stats import Reducer, prefix_keys


class LoggedRun(Protocol):
    """The members of a trainer that its log reads."""

    cfg: TrainerConfig
    control: Control
    reducers: Mapping[str, Reducer]
    schedule: RunSchedule
    train_logger: TrainingLogger | None

    @property
    def current_step(self) -> int: ...


class StepLog:
    """Logs the steps of a run. All ranks call `log`."""

    def __init__(self, run: LoggedRun) -> None:
        self._run = run
        self._rank_times = RankTimes()
        self._time_left = TimeLeft()

    def begin(self, last: int | None) -> None:
        """Called before the first step of `train`. `last`: number of the last step; None: until the
        data ends."""
        self._time_left.begin(self._run.current_step, last)

    def log(self, record: StepRecord, prepared: Prepared) -> dict[str, float]:
        """Log the step that was just taken if it is due; returns what was logged, or only its
        number. The controllers of the run see every step."""
        run, step = self._run, self._run.current_step
        is_logged, is_controlled = step % run.cfg.log_every == 0, bool(run.control.controllers)
        if not is_logged and not is_controlled:
            return {"train/step": float(step)}
        stats = record.stats(run.reducers, run.cfg, of_all_ranks=is_controlled)
        stats |= run.control.update(stats, prepared, run.schedule, run.cfg.model_device, step=step - 1)
        if not is_logged:
            return {"train/step": float(step)}
        waited = self._rank_times.compare(record.timer.seconds("forward_backward"), run.cfg.model_device)
        left = self._time_left.after(step)
        waited |= {} if left is None else {"perf/time_left_s": left}
        grouped = prefix_keys({"train_step": float(step), **stats, **waited})
        log_safely(run.train_logger, step, grouped)
        return grouped
