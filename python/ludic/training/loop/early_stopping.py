"""Ends a run after a number of evaluations in which one metric did not improve, and keeps the
weights of the best one."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ludic.errors import ConfigError
from ludic.files.atomic import read_json, restore_replaced
from ludic.files.checkpoints import BEST, WEIGHT_FILES
from ludic.files.manifest import MANIFEST, find_faults
from ludic.training import ranks
from ludic.training.backend.protocol import TrainingBackend
from ludic.training.backend.saving import save_weights_alone
from ludic.training.config import TrainerConfig
from ludic.training.evaluators.protocol import bare_name

logger = logging.getLogger(__name__)

_MIN_WORDS = {"loss", "perplexity", "nll", "ece", "error", "errors", "fpr", "fnr", "negative", "failed", "incomplete"}
_MAX_WORDS = {
    *("accuracy", "acc", "auc", "auroc", "reward", "pass", "score", "tpr", "margin", "correct", "right", "solved", "won", "win")
}
"""Words in the names of metrics that are better when they are small, or large. If a name has words
of both, as `negative_margin_rate` has, small is better."""


def metric_direction(cfg: TrainerConfig) -> Literal["min", "max"]:
    """`find_direction` of `early_stopping_metric` and `early_stopping_mode`."""
    names = {"setting": "early_stopping_metric", "mode_setting": "early_stopping_mode"}
    return find_direction(cfg.early_stopping_metric, cfg.early_stopping_mode, **names)


def find_direction(metric: str, mode: Literal["auto", "min", "max"], *, setting: str, mode_setting: str) -> Literal["min", "max"]:
    """Whether the metric is better when it is small ("min") or large ("max"). Raises ConfigError
    where `mode` contradicts the metric's name, and where it is "auto" and the name implies nothing.
    Both settings have names for errors."""
    words = set(re.split(r"[^a-z]+", metric.lower()))
    implied: Literal["min", "max"] | None = "min" if words & _MIN_WORDS else "max" if words & _MAX_WORDS else None
    if mode == "auto":
        if implied is None:
            raise ConfigError(f"{setting} ({metric}) does not tell whether lower is better; set {mode_setting} to min or max")
        return implied
    if implied is not None and implied != mode:
        raise ConfigError(f"{mode_setting} ({mode}) would stop a model whose {metric} improves; set {implied}, or leave it out")
    return mode


def check_early_stopping(cfg: TrainerConfig) -> None:
    """Raise ConfigError for a patience without evaluations, or for a metric whose direction is
    unknown."""
    if cfg.early_stopping_patience is None:
        return
    if cfg.eval_every_n_steps is None:
        raise ConfigError(f"early_stopping_patience ({cfg.early_stopping_patience}) needs evaluations; set eval_every_n_steps")
    metric_direction(cfg)


@dataclass
class EarlyStopping:
    """The best value so far, and how many evaluations came after it."""

    cfg: TrainerConfig
    best: float | None = None
    stale: int = 0
    best_step: int | None = None
    """The step of the best evaluation."""

    def update(self, value: float) -> tuple[bool, bool]:
        """Record a value. Returns whether to stop, and whether it is an improvement, as the first
        value always is."""
        improved = self.best is None or self._gain(value, self.best) > self.cfg.early_stopping_min_delta
        if improved:
            self.best, self.stale = value, 0
        else:
            self.stale += 1
        return self.stopped, improved

    @property
    def stopped(self) -> bool:
        """Whether the patience is exhausted. This follows from `state_dict`, so a run that was
        stopped stays stopped after it is resumed."""
        patience = self.cfg.early_stopping_patience
        return patience is not None and self.stale >= patience

    def should_stop(self, metrics: Mapping[str, float]) -> bool:
        """`update` with the metrics of an evaluation; False without a patience."""
        if self.cfg.early_stopping_patience is None:
            return False
        name = self.cfg.early_stopping_metric
        for key in (name, bare_name(name)):
            if key in metrics:
                return self.update(float(metrics[key]))[0]
        raise ConfigError(f"early_stopping_metric ({name}) must be a metric of the evaluator: {', '.join(sorted(metrics))}")

    def record_evaluation(self, metrics: Mapping[str, float], step: int, device: torch.device | str) -> bool:
        """`update` with the metrics of rank 0, which may be the only rank that has them; all ranks
        get the result. Returns whether this evaluation is the best so far; False without a
        patience."""
        if self.cfg.early_stopping_patience is None:
            return False
        found = [0.0, 0.0]
        if ranks.rank() == 0:
            self.should_stop(metrics)
            assert self.best is not None
            found = [float(self.stale), self.best]
        stale, self.best = ranks.sum_over_ranks(found, device)  # of zeros and the numbers of rank 0
        self.stale = int(stale)
        if self.stale == 0:
            self.best_step = step
        return self.stale == 0

    def _gain(self, value: float, best: float) -> float:
        """How much better `value` is. NaN is worse than any number."""
        if math.isnan(value) or math.isnan(best):
            return -math.inf if math.isnan(value) else math.inf
        return best - value if metric_direction(self.cfg) == "min" else value - best

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "stale": self.stale, "best_step": self.best_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.stale, self.best_step = state["best"], int(state["stale"]), state.get("best_step")


class BestWeights:
    """Keeps one set of weights: in a folder next to the checkpoints, or in memory without
    checkpoints.

    With several ranks, all call both methods. Rank 0 writes the folder; of a sharded model, each
    rank writes its own files.
    """

    def __init__(self, backend: TrainingBackend, checkpoints: Path | None) -> None:
        self._backend = backend
        self.folder = None if checkpoints is None else checkpoints / BEST
        self._in_memory: tuple[int, Any] | None = None

    def keep(self, step: int) -> None:
        """Keep the current weights, of step `step`, and drop the previous ones."""
        if self.folder is None:
            self._in_memory = step, self._backend.snapshot_weights().wait()
            return
        doing = f"saving the best weights, of step {step}"
        save_weights_alone(self._backend, self.folder, step, doing=doing, facts="best.json")

    def restore(self, step: int) -> bool:
        """Set the model to the weights of `step`. Returns False, and changes nothing, if another
        step's weights or none were kept, or if they are damaged."""
        if self._in_memory is not None and self._in_memory[0] == step:
            self._backend.restore_weights(self._in_memory[1]).wait()
            return True
        folder = self.folder
        if folder is None or not ranks.ask_rank_0(f"looking for the weights of step {step}", lambda: self._holds(folder, step)):
            return False
        self._backend.load(folder, optimizer=False).wait()
        return True

    @staticmethod
    def _holds(folder: Path, step: int) -> bool:
        """Whether the folder has the undamaged weights of `step`."""
        restore_replaced(folder.parent)
        if not (folder / "best.json").is_file():
            return False
        faults = find_faults(folder, WEIGHT_FILES) if (folder / MANIFEST).exists() else []
        if faults:
            logger.warning("%s is damaged: %s", folder, ", ".join(faults))
        return not faults and read_json(folder / "best.json")["step"] == step
