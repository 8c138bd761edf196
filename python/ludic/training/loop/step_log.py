"""The log line of each training step, and what the controllers see of it."""

from __future__ import annotations

import logging
import socket
import statistics
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ludic.training import ranks
from ludic.training.config import TrainerConfig
from ludic.training.loggers.base import TrainingLogger
from ludic.training.loop.control import Control
from ludic.training.loop.outputs import log_safely
from ludic.training.loop.schedule import RunSchedule
from ludic.training.loop.step_record import StepRecord
from ludic.training.loop.timings import TimeLeft
from ludic.training.preparation import Prepared
from ludic.training.stats import Reducer, prefix_keys

logger = logging.getLogger(__name__)


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


SLOW, STEPS_IN_A_ROW = 1.5, 5
"""A rank is named in a warning if it takes so many times the median for so many steps."""


class RankTimes:
    """Compares the seconds that the ranks compute in each step.

    Without a wrapper a rank computes alone until the gradients are summed. The forward and backward
    passes of a wrapped model exchange tensors, so that all ranks appear equally slow.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._last_slow: int | None = None

    def compare(self, seconds: float, device: torch.device | str) -> dict[str, float]:
        """`ranks/wait_s` and `ranks/slowest`, from the seconds of this rank; empty with one rank.
        All ranks call it: one exchange of a number."""
        if not ranks.is_distributed():
            return {}
        own = [0.0] * ranks.world_size()
        own[ranks.rank()] = seconds
        everyone = ranks.sum_over_ranks(own, device)
        self._warn_if_slow(everyone)
        return describe_wait(everyone)

    def _warn_if_slow(self, everyone: Sequence[float]) -> None:
        slow = find_slow(everyone)
        self._in_a_row = self._in_a_row + 1 if slow is not None and slow == self._last_slow else int(slow is not None)
        self._last_slow = slow
        if self._in_a_row == STEPS_IN_A_ROW and slow == ranks.rank():
            logger.error(
                "rank %d, on %s, has taken %.1f times as long as the median of the ranks for %d steps: all wait for it",
                slow,
                socket.gethostname(),
                everyone[slow] / statistics.median(everyone),
                STEPS_IN_A_ROW,
            )


def describe_wait(seconds: Sequence[float]) -> dict[str, float]:
    """The mean over ranks of the time that a rank waits for the slowest, and the number of that.

    Example: [1.0, 3.0] seconds: rank 0 waits 2 s and rank 1 none, so `wait_s` is 1, `slowest` 1.
    """
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return {"ranks/wait_s": seconds[slowest] - statistics.fmean(seconds), "ranks/slowest": float(slowest)}


def find_slow(seconds: Sequence[float]) -> int | None:
    """The slowest rank, if it took more than `SLOW` times the median.

    Example: of two ranks, [1.0, 4.0] has the median 2.5 and names rank 1.
    """
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    return slowest if seconds[slowest] > SLOW * statistics.median(seconds) > 0 else None
