"""Keeps the checkpoint of the best evaluation."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from ludic.files.atomic import write_json
from ludic.training.callbacks.protocol import Callback, TrainingEvent
from ludic.training.callbacks.stop_on_metric import Metric, Mode

logger = logging.getLogger(__name__)

FILE_NAME = "best.json"


class KeepBest(Callback):
    """Saves a checkpoint at each evaluation that is the best so far, and keeps it from being
    deleted until there is a better one. `best.json` next to the checkpoints names it: {"step": 40,
    "checkpoint": "step_000040", "metric": "eval/loss", "value": 1.25}.

    The run still ends with the weights of its last step, and resumes from its newest checkpoint.
    Evaluations before the first step do not count, nor does one whose checkpoint is missing or
    damaged when the run resumes.
    """

    needs_checkpoints = True

    def __init__(self, metric: str, *, mode: Mode = "auto") -> None:
        """`metric`: one of the evaluation's, such as `loss`. `mode`: `min`, `max`, or `auto`, which
        follows from its name."""
        self.metric = Metric(metric, mode)
        self.metric.require_evaluations("KeepBest")
        self.best: float | None = None
        self.best_step: int | None = None
        self._is_named = False
        """Whether the file names the best checkpoint."""
        self._is_loaded = False
        """Whether the best one is of an earlier process, and its checkpoint was not looked for."""

    @property
    def name(self) -> str:
        return f"keep_best {self.metric.key}"

    @property
    def watched_metric(self) -> str:
        return self.metric.name

    @property
    def kept_steps(self) -> Collection[int]:
        return () if self.best_step is None else (self.best_step,)

    def on_evaluation(self, event: TrainingEvent) -> None:
        self._forget_missing(event)
        value = self.metric.read(event.stats)
        if value is not None and event.step > 0 and self.metric.is_better(value, self.best):
            event.save_checkpoint()
            self.best, self.best_step, self._is_named = value, event.step, False

    def on_step(self, event: TrainingEvent) -> None:
        self._name_best(event)

    def on_end(self, event: TrainingEvent) -> None:
        self._name_best(event)

    def _name_best(self, event: TrainingEvent) -> None:
        """Write the file, once the checkpoint of the best evaluation is saved."""
        self._forget_missing(event)
        manager = event.trainer.checkpointer
        if manager is not None and not self._is_named and self.best_step is not None:
            folder = f"step_{self.best_step:06d}"
            content = {"step": self.best_step, "checkpoint": folder, "metric": self.metric.key, "value": self.best}
            write_json(manager.root / FILE_NAME, content)
            self._is_named = True

    def _forget_missing(self, event: TrainingEvent) -> None:
        """Forget a loaded best whose checkpoint is gone. Example: step 20 was the best, then step
        40, so that 20 was deleted; 40 is damaged, and the state in the checkpoint 30 names 20."""
        manager, is_loaded = event.trainer.checkpointer, self._is_loaded
        self._is_loaded = False
        if not is_loaded or manager is None or self.best_step is None or manager.holds(self.best_step):
            return
        logger.warning("the best checkpoint, of step %d, is missing or damaged; the next evaluation is the best", self.best_step)
        (manager.root / FILE_NAME).unlink(missing_ok=True)
        self.best = self.best_step = None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_step = state["best"], state["best_step"]
        self._is_named, self._is_loaded = False, True
