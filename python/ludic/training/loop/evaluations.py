"""The evaluations of a run: when one is due, what it gave, and whether the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ludic.event_loop import await_if_needed
from ludic.training import ranks, watchdog
from ludic.training.backend.protocol import TrainingBackend
from ludic.training.checkpoint import CheckpointManager
from ludic.training.config import TrainerConfig
from ludic.training.evaluators.protocol import Evaluator, runs_on_all_ranks
from ludic.training.loggers.base import TrainingLogger
from ludic.training.loop.best_weights import BestWeights
from ludic.training.loop.callbacks import Callbacks
from ludic.training.loop.early_stopping import EarlyStopping
from ludic.training.loop.metric_names import eval_key
from ludic.training.loop.outputs import log_safely, sync_safely
from ludic.training.rng import preserved_rng
from ludic.training.stats import Reducer

logger = logging.getLogger(__name__)


class EvaluatedRun(Protocol):
    """The members of a trainer that evaluations read, as they are at each step."""

    cfg: TrainerConfig
    evaluator: Evaluator | None
    backend: TrainingBackend
    checkpointer: CheckpointManager | None
    train_logger: TrainingLogger | None
    callbacks: Callbacks

    @property
    def current_step(self) -> int: ...

    async def ensure_checkpoint(self) -> None: ...


class Evaluations:
    """Evaluates a run, counts evaluations without improvement, and keeps the weights of the best
    one."""

    def __init__(self, run: EvaluatedRun) -> None:
        self._run = run
        self.early_stopping = EarlyStopping(run.cfg)
        self.best_weights = BestWeights(run.backend, None if run.checkpointer is None else run.checkpointer.root)
        self.has_best_weights = False
        """Whether the model has the weights of the best evaluation, not those of the last step."""
        self.last_eval: dict[str, float] = {}
        """What the last evaluation gave, as it was logged."""
        self.evaluated_step: int | None = None
        """The step of the last evaluation that `eval_at_start` or `eval_every_n_steps` asked
        for."""

    def is_due(self) -> bool:
        """Whether the present step must be evaluated and was not yet. A run that was killed between
        the checkpoint and the evaluation of a step evaluates it when it is resumed."""
        run = self._run
        return run.evaluator is not None and run.cfg.evaluates_at(run.current_step) and self.evaluated_step != run.current_step

    async def evaluate(
        self,
        evaluator: Evaluator,
        *,
        reducers: Mapping[str, Reducer] | None,
        limits: Mapping[str, Any],
        log_fn: Callable[[dict[str, float]], Any] | None,
    ) -> dict[str, Any]:
        """Evaluate, log the metrics, and return `records` and `metrics`, which are empty on ranks
        that do not evaluate. Random generators keep their state."""
        run = self._run
        records: list[Any] = []
        metrics: dict[str, float] = {}
        together = runs_on_all_ranks(evaluator)
        doing = f"the evaluation of step {run.current_step}"
        with watchdog.phase("evaluation"), ranks.agree(doing) if together else ranks.rank_0_alone(doing):
            if ranks.rank() == 0 or together:
                with preserved_rng():
                    records, metrics = await evaluator.eval(reducers=reducers, **limits)
                self.last_eval = {eval_key(name): value for name, value in metrics.items()} | {
                    "eval/step": float(run.current_step)
                }
                log_safely(run.train_logger, run.current_step, self.last_eval)
                if log_fn is not None and ranks.rank() == 0:
                    await await_if_needed(log_fn(self.last_eval))
        return {"records": records, "metrics": metrics}

    async def record(self, metrics: Mapping[str, float]) -> None:
        """Record the evaluation of the present step, in its checkpoint too, and keep the weights if
        they are the best so far. The weights before the first step are never kept. Callbacks see
        it, and may have a checkpoint saved."""
        run, step = self._run, self._run.current_step
        await run.callbacks.on_evaluation(metrics)
        if step > 0 and self.early_stopping.record_evaluation(metrics, step, run.cfg.model_device):
            self.best_weights.keep(step)
        self.evaluated_step = step
        if run.checkpointer is not None:
            sync_safely(run.train_logger, step)
            run.checkpointer.amend(step, {**self.state_dict(), **run.callbacks.state()})
        if run.callbacks.take_save_request():
            await run.ensure_checkpoint()

    async def end_if_stopped(self) -> bool:
        """Return whether early stopping ends the run. If so, save a checkpoint of the last step,
        from which a run with more patience continues, and restore the best weights."""
        run = self._run
        if self.early_stopping.stopped:
            await run.ensure_checkpoint()
            self.restore_best()
        return self.early_stopping.stopped

    def restore_best(self) -> int | None:
        """Set the weights to those of the best evaluation and return its step. Without a best
        evaluation, or if its weights are missing, change nothing and return None."""
        step = self.early_stopping.best_step
        if step is None:
            return None
        if not self.best_weights.restore(step):
            logger.warning("the best weights, of step %d, are missing; those of step %d stay", step, self._run.current_step)
            return None
        self.has_best_weights = True
        return step

    def undo_restore_best(self, has_checkpoint: Callable[[], bool], resume: Callable[[int], None]) -> None:
        """Set the weights to those of the last step, with `resume` from its checkpoint. Does
        nothing if the model has them already."""
        if not self.has_best_weights:
            return
        step = self._run.current_step
        if has_checkpoint():
            resume(step)
        else:
            logger.warning("training goes on from the best weights: there is no checkpoint of step %d", step)
        self.has_best_weights = False

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints save."""
        return {
            "early_stopping": self.early_stopping.state_dict(),
            "last_eval": self.last_eval,
            "evaluated_step": self.evaluated_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, which may have other keys too. A checkpoint of an older version
        may lack any of these."""
        if "early_stopping" in state:
            self.early_stopping.load_state_dict(state["early_stopping"])
        self.last_eval = dict(state.get("last_eval", {}))
        self.evaluated_step = state.get("evaluated_step")
