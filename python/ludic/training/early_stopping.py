"""When to stop: no improvement of one metric over a number of evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ludic.errors import ConfigError
from ludic.training import ranks
from ludic.training.config import TrainerConfig


@dataclass
class EarlyStopping:
    """The best value so far, and how many evaluations it is old."""

    cfg: TrainerConfig
    best: float | None = None
    stale: int = 0

    def update(self, value: float) -> tuple[bool, bool]:
        """Take note of a value: whether to stop, and whether it is an improvement. The first value always is."""
        improved = self.best is None or self._gain(value, self.best) > self.cfg.early_stopping_min_delta
        if improved:
            self.best, self.stale = value, 0
        else:
            self.stale += 1
        return self.stopped, improved

    @property
    def stopped(self) -> bool:
        """Whether patience is at its end. It follows from what a checkpoint holds, so that a run that has ended stays ended."""
        patience = self.cfg.early_stopping_patience
        return patience is not None and self.stale >= patience

    def should_stop(self, metrics: Mapping[str, float]) -> bool:
        """The same, from the metrics of an evaluation. Without a patience there is nothing to do."""
        if self.cfg.early_stopping_patience is None:
            return False
        name = self.cfg.early_stopping_metric
        for key in (name, name.removeprefix("eval_"), name.removeprefix("eval/")):
            if key in metrics:
                return self.update(float(metrics[key]))[0]
        raise ConfigError(f"early_stopping_metric ({name}) must be one that the evaluator gives: {', '.join(sorted(metrics))}")

    def heed(self, metrics: Mapping[str, float], device: torch.device | str) -> None:
        """`should_stop` on rank 0, which may be the only one that has metrics; afterwards all ranks know how patience stands."""
        if ranks.rank() == 0:
            self.should_stop(metrics)
        stale = self.stale if ranks.rank() == 0 else 0
        self.stale = int(ranks.max_over_ranks([float(stale)], device)[0])

    def _gain(self, value: float, best: float) -> float:
        if math.isnan(value):
            return -math.inf
        return best - value if self.cfg.early_stopping_mode == "min" else value - best

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "stale": self.stale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.stale = state["best"], int(state["stale"])
