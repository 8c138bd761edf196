"""The learning rate over a run: a pure function of the step, without state.

A step is a macro-batch: all optimizer steps over one batch use the same rate.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from ludic.errors import check_value
from ludic.training.config import SCHEDULER_TYPES, SchedulerType, TrainerConfig

logger = logging.getLogger(__name__)

DEFAULT_TOTAL_STEPS = 1_000_000


def depends_on_total(cfg: TrainerConfig) -> bool:
    """Whether the rate of a step depends on how many there are."""
    if cfg.lr_scheduler_type in (None, "constant"):
        return False
    return cfg.lr_scheduler_type != "constant_with_warmup" or bool(cfg.warmup_ratio and not cfg.warmup_steps)


@dataclass(frozen=True)
class LearningRateSchedule:
    """Factor of the learning rate at each step, 0-based.

    Warm-up: `(step + 1) / warmup_steps`, so that the rate of the first step is not 0. Afterwards,
    with `p` the finished share of the remaining steps: `linear` is `1 - p`, `cosine` is
    `(1 + cos(pi p)) / 2`, both scaled to end at `min_ratio`. `wsd` (warm-up, stable, decay;
    arXiv:2404.06395, section 4.2) stays at 1 until the last `decay_ratio` of all steps, which are
    as in `linear`. `constant_with_warmup` stays at 1; `constant` and None always are 1.

    >>> LearningRateSchedule("linear", warmup_steps=2, total_steps=6).factor(3)
    0.75
    """

    kind: SchedulerType | None = None
    warmup_steps: int = 0
    total_steps: int = DEFAULT_TOTAL_STEPS
    """The step at which the decay ends. The rate stays at its minimum afterwards."""
    min_ratio: float = 0.0
    decay_ratio: float = 0.1

    def __post_init__(self) -> None:
        check_value("lr_scheduler_type", self.kind, optional=True, choices=SCHEDULER_TYPES)
        check_value("total_training_steps", self.total_steps, least=1)

    @classmethod
    def from_config(cls, cfg: TrainerConfig, total_steps: int | None) -> LearningRateSchedule:
        """The schedule of the config. `warmup_steps` takes precedence over `warmup_ratio`;
        `total_steps` None means 1,000,000."""
        total = DEFAULT_TOTAL_STEPS if total_steps is None else total_steps
        warmup = cfg.warmup_steps or int((cfg.warmup_ratio or 0.0) * total)
        return cls(cfg.lr_scheduler_type, warmup, total, cfg.lr_min_ratio, cfg.decay_ratio)

    def factor(self, step: int) -> float:
        """The factor of `lr` at `step`."""
        if self.kind in (None, "constant"):
            return 1.0
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant_with_warmup":
            return 1.0
        begin = self.warmup_steps
        if self.kind == "wsd":
            begin = max(begin, self.total_steps - round(self.decay_ratio * self.total_steps))
        done = min(1.0, max(0, step - begin) / max(1, self.total_steps - begin))
        decay = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.min_ratio + (1 - self.min_ratio) * decay

    def state_dict(self, step: int) -> dict[str, int]:
        """What checkpoints save: the position in the schedule."""
        return {"last_step": step, "total_steps": self.total_steps, "warmup_steps": self.warmup_steps}


class RunSchedule:
    """The schedule of a run. The length of the run may be unknown until the run begins."""

    def __init__(self, cfg: TrainerConfig, total_steps: int | None) -> None:
        """`total_steps` None means the number of the first `begin`, or else
        `DEFAULT_TOTAL_STEPS`."""
        self._cfg, self._is_open, self._is_guessed = cfg, total_steps is None, total_steps is None
        self._schedule = LearningRateSchedule.from_config(cfg, total_steps)

    def begin(self, last_step: int | None) -> None:
        """Set the length of the run, if this is the first call and it has none yet. None means the
        default."""
        if last_step is not None and self._is_open and self._cfg.lr_scheduler_type is not None:
            self._schedule, self._is_guessed = LearningRateSchedule.from_config(self._cfg, last_step), False
        self._is_open = False

    def resume(self, total_steps: int) -> None:
        """Continue the schedule of a resumed run. `begin` does not change it afterwards."""
        self._schedule = LearningRateSchedule.from_config(self._cfg, total_steps)
        self._is_open = self._is_guessed = False

    def warn_once_if_guessed(self) -> None:
        """Warn if the decay is stretched over the default length."""
        is_guessed, self._is_guessed = self._is_guessed, False
        if is_guessed and depends_on_total(self._cfg):
            logger.warning(
                "lr_scheduler_type=%s is stretched over %s steps, because their number is not set: pass total_training_steps to Trainer, "
                "or num_steps to train()",
                self._cfg.lr_scheduler_type,
                f"{self._schedule.total_steps:,}",
            )

    def factor(self, step: int) -> float:
        """The factor of `lr` at `step`."""
        return self._schedule.factor(step)

    @property
    def total_steps(self) -> int:
        """The number of steps that the schedule is made for."""
        return self._schedule.total_steps

    @property
    def warmup_steps(self) -> int:
        """Steps until the rate is whole."""
        return 0 if self._schedule.kind in (None, "constant") else self._schedule.warmup_steps

    def state_dict(self, step: int) -> dict[str, int]:
        return self._schedule.state_dict(step)
