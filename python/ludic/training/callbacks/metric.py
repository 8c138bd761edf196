"""A metric that callbacks watch: where it is found, and whether it is better small or large."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ludic.errors import ConfigError
from ludic.training.loop.early_stopping import find_direction
from ludic.training.loop.metric_names import bare_name, eval_key

Mode = Literal["auto", "min", "max"]


@dataclass(frozen=True)
class Metric:
    """`train/loss` is of steps; all others are of evaluations: `loss`, `eval_loss`, `eval/loss`, or
    `eval_seed/pass_at_n`."""

    name: str
    mode: Mode = "auto"

    def __post_init__(self) -> None:
        """Raises ConfigError if the direction is unknown, or contradicts the name."""
        if self.mode not in ("auto", "min", "max"):
            raise ConfigError(f"mode ({self.mode}) must be auto, min or max")
        find_direction(self.name, self.mode, setting="metric", mode_setting="mode")

    def require_evaluations(self, who: str) -> None:
        """Raise ConfigError for a metric of steps."""
        if self.is_of_steps:
            raise ConfigError(f"{who} compares evaluations, and metric ({self.name}) is one of training steps; name one of eval/")

    @property
    def is_of_steps(self) -> bool:
        """Whether steps have it, not evaluations."""
        return self.name.startswith("train/")

    @property
    def key(self) -> str:
        """With its prefix: `eval/loss` for `loss`, `eval_loss` and `eval/loss`."""
        return self.name if self.is_of_steps else eval_key(bare_name(self.name))

    def read(self, stats: Mapping[str, float]) -> float | None:
        """The value in the statistics of a step; None if the step has none. An evaluation that has
        none raises ConfigError."""
        if self.key in stats:
            return float(stats[self.key])
        if self.is_of_steps:
            return None
        known = ", ".join(sorted(key for key in stats if key != "eval/step"))
        raise ConfigError(f"metric ({self.name}) must be one of the evaluation's: {known}")

    def is_better(self, value: float, best: float | None, *, by: float = 0.0) -> bool:
        """Whether `value` is better than `best` by more than `by`. Any number is better than
        none, and NaN is never better."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return (best - value if self.smaller_is_better else value - best) > by

    def reaches(self, value: float, threshold: float) -> bool:
        """Whether `value` is as good as `threshold`."""
        return value <= threshold if self.smaller_is_better else value >= threshold

    @property
    def smaller_is_better(self) -> bool:
        return find_direction(self.name, self.mode, setting="metric", mode_setting="mode") == "min"
