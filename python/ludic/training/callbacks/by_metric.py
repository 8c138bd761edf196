"""Callbacks that follow a metric: one ends the run, one keeps the best checkpoint, one lowers the
learning rate, skips batches or ends the run where samples are too far off-policy."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ludic.errors import ConfigError, check_value
from ludic.files.atomic import write_json
from ludic.training.callbacks.base import Callback, TrainingEvent
from ludic.training.evaluators.protocol import bare_name, eval_key
from ludic.training.loop.early_stopping import find_direction

logger = logging.getLogger(__name__)

FILE_NAME = "best.json"


class StopOnMetric(Callback):
    """Ends a run whose metric is as good as `at`, or was not better than its best for `patience`
    values in a row.

    A metric of evaluations has a value at each evaluation but the one before the first step;
    `train/...` has one at each step that is logged. The run ends with the weights of its last step;
    `TrainerConfig.early_stopping_patience` ends it with the weights of its best evaluation.

    >>> StopOnMetric("eval/sampled_reward", at=0.95)
    >>> StopOnMetric("loss", patience=3, min_delta=0.01)
    """

    def __init__(
        self,
        metric: str,
        *,
        at: float | None = None,
        patience: int | None = None,
        min_delta: float = 0.0,
        mode: Mode = "auto",
    ) -> None:
        """`min_delta`: a value that is better by no more than this is no improvement. `mode`:
        `min`, `max`, or `auto`, which follows from the metric's name."""
        if at is None and patience is None:
            raise ConfigError(f"StopOnMetric({metric!r}) never stops; set at=, patience=, or both")
        check_value("patience", patience, "values without improvement that end the run", optional=True, least=1)
        check_value("min_delta", min_delta, least=0)
        self.metric, self.at, self.patience, self.min_delta = Metric(metric, mode), at, patience, min_delta
        self.best: float | None = None
        self.stale = 0
        """Values since the best one."""

    @property
    def name(self) -> str:
        return f"stop_on {self.metric.key}"

    @property
    def watched_metric(self) -> str | None:
        return None if self.metric.is_of_steps else self.metric.name

    def on_step(self, event: TrainingEvent) -> None:
        if self.metric.is_of_steps:
            self._see(event)

    def on_evaluation(self, event: TrainingEvent) -> None:
        if not self.metric.is_of_steps and event.step > 0:
            self._see(event)

    def _see(self, event: TrainingEvent) -> None:
        value = self.metric.read(event.stats)
        if value is None:
            return
        if self.metric.is_better(value, self.best, by=self.min_delta):
            self.best, self.stale = value, 0
        else:
            self.stale += 1
        if self.at is not None and self.metric.reaches(value, self.at):
            event.stop(f"{self.metric.key} ({value:g}) reached {self.at:g}")
        elif self.patience is not None and self.stale >= self.patience:
            best = "was never a number" if self.best is None else f"was not better than {self.best:g}"
            event.stop(f"{self.metric.key} {best} for {self.stale} {'steps' if self.metric.is_of_steps else 'evaluations'}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "stale": self.stale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.stale = state["best"], int(state["stale"])


ESS = "mismatch/ess"


class OffPolicyGuard(Callback):
    """Acts on batches whose `mismatch/ess`, the effective share of the tokens under importance
    weights, is below `ess`: it drops before a collapse (arXiv:2602.17616, which scales the learning
    rate by it, too).

    `lower` multiplies the learning rate of the batch by `mismatch/ess` / `ess`. `skip` drops its
    gradient. `stop` drops it, and the `patience`-th such batch in a row ends the run. The first
    optimizer step of a batch decides for all. It takes no pass of its own. Counts survive a resume.

    >>> OffPolicyGuard(0.5, action="skip")
    """

    def __init__(self, ess: float, *, action: Action = "lower", patience: int = 1) -> None:
        check_value("ess", ess, "share of the tokens", above=0, most=1)
        check_value("action", action, choices=get_args(Action))
        check_value("patience", patience, "batches in a row that end the run", least=1)
        self.ess, self.action, self.patience = ess, action, patience
        self.counts = {"lowered": 0, "skipped": 0, "in_a_row": 0}

    def on_gradient(self, event: TrainingEvent) -> None:
        value, counts, factor = event.stats.get(ESS, 0.0), self.counts, 1.0
        is_low = value < self.ess  # nan is not: the optimizer refuses its gradient
        counts["in_a_row"] = counts["in_a_row"] + 1 if is_low else 0
        if is_low:
            factor = value / self.ess if self.action == "lower" else 0.0
            counts["lowered" if factor else "skipped"] += 1
            logger.info("step %d: %s (%.3g) is below %g, rate x %.3g", event.step + 1, ESS, value, self.ess, factor)
        event.scale_batch(factor, {"guard/rate": factor, **{f"guard/{name}": count for name, count in counts.items()}})
        if ESS not in event.stats:
            event.stop(f"the guard reads {ESS}, and the samples have no log-probabilities of the sampler")
        elif self.action == "stop" and counts["in_a_row"] >= self.patience:
            event.stop(f"{ESS} ({value:.3g}) was below {self.ess:g} for {counts['in_a_row']} batches")

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = dict(state)


Action = Literal["lower", "skip", "stop"]
Mode = Literal["auto", "min", "max"]


@dataclass(frozen=True)
class Metric:
    """`train/loss` is of steps; all others are of evaluations: `loss`, `eval_loss`, `eval/loss`, or
    `eval_seed/pass_at_n`."""

    name: str
    mode: Mode = "auto"

    def __post_init__(self) -> None:
        """Raises ConfigError if the direction is unknown, or contradicts the name."""
        check_value("mode", self.mode, choices=get_args(Mode))
        find_direction(self.name, self.mode, setting="metric", mode_setting="mode")

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
        if self.metric.is_of_steps:
            raise ConfigError(f"KeepBest compares evaluations, and metric ({metric}) is one of training steps; name one of eval/")
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
