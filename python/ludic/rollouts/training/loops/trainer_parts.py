"""The parts of a `Trainer` that the loops build: source, credit, publisher, and the log of the run.

AsyncRolloutManager -> ManagerSource -> LoopTrainer -> EnginePublisher -> engines
                                             |
                                          LoopLog -> metrics logger
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ludic.errors import ConfigError, PublishError, RequestsExhausted, RolloutAborted, RolloutError
from ludic.files.atomic import read_json, write_json
from ludic.files.checkpoints import STATE
from ludic.rollouts.training.backends.foreign import ForeignBackend
from ludic.rollouts.training.backends.pytorch import WITHOUT_LIMIT, PyTorchTrainingBackend
from ludic.rollouts.training.metrics import ResumableLogger
from ludic.training import ranks
from ludic.training.algorithm import RLAlgorithm
from ludic.training.batching.shared_batches import SharedBatches
from ludic.training.batching.source import BatchSourceBase
from ludic.training.checkpoint import CheckpointConfig, CheckpointManager
from ludic.training.config import TrainerConfig
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss.base import Loss
from ludic.training.trainer import Trainer
from ludic.training.types import CreditAssigner

logger = logging.getLogger(__name__)

PLAIN_KEYS = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/lr": "lr"}
"""Key of the trainer -> name in the metrics of a loop."""
LOG = "metrics_log"
"""The key in the state of a checkpoint under which it has the mark of the metrics logger."""
LOG_BEGIN = "log_begin.json"
"""The file next to the checkpoints that has the mark of the start of the run, for a run that is
killed before its first checkpoint."""


@dataclass(frozen=True)
class LoopSettings:
    """What both loops set."""

    num_steps: int
    log_every: int
    checkpoint_every: int
    seed: int
    sync_every: int = 0
    epochs_per_batch: int = 1
    minibatches_per_batch: int = 1


class OwnLoss(Loss):
    """The loss of a backend that has its own. `Trainer` never computes it."""


def adapt_backend(backend: Any) -> PyTorchTrainingBackend | ForeignBackend:
    """The backend as a `Trainer` takes it. All parts of a run use the same."""
    return backend if isinstance(backend, PyTorchTrainingBackend | ForeignBackend) else ForeignBackend(backend)


def build_trainer(
    backend: PyTorchTrainingBackend | ForeignBackend,
    source: BatchSourceBase,
    log: LoopLog,
    *,
    publisher: Any = None,
    credit: CreditAssigner | None = None,
    resume: bool = False,
) -> LoopTrainer:
    """The trainer of a loop. With `resume` it goes on from the newest checkpoint of the backend, if
    there is one, and what was logged after it is removed."""
    settings = log.settings
    own = backend if isinstance(backend, PyTorchTrainingBackend) else None
    base = own.cfg if own else TrainerConfig(**FOREIGN_SETTINGS)
    trained: Any = backend
    loss = own.algo.loss if own else OwnLoss()
    checkpointer = make_checkpointer(own, settings.checkpoint_every) if own else None
    folder = find_checkpoint(checkpointer) if resume else None
    trainer = LoopTrainer(
        log,
        model=own.model if own else None,
        algo=RLAlgorithm(name=own.algo.name if own else "foreign", credit_assigner=credit or ConstantCredit(1.0), loss=loss),
        batch_source=SharedBatches(source) if ranks.is_distributed() else source,
        publisher=publisher,
        cfg=replace(
            base,
            sync_every_steps=0 if publisher is None else settings.sync_every,
            epochs_per_batch=settings.epochs_per_batch,
            minibatches_per_batch=settings.minibatches_per_batch,
            seed=settings.seed,
        ),
        backend=trained,
        checkpointer=checkpointer,
        resume_from=folder,
        total_training_steps=settings.num_steps,
    )
    if checkpointer is not None and ranks.rank() == 0:
        begin = checkpointer.root / LOG_BEGIN
        if folder is not None:
            log.cut(read_json(Path(folder) / STATE).get(LOG), trainer.current_step)
        elif resume and begin.exists():  # killed before its first checkpoint
            log.cut(read_json(begin).get(LOG), 0)
        else:
            log.note_begin(begin)
    return trainer


class LoopTrainer(Trainer):
    """Writes into each checkpoint how much was logged before it."""

    def __init__(self, log: LoopLog, **parts: Any) -> None:
        self._log = log
        super().__init__(**parts)

    def save_checkpoint(self, *, metadata: Mapping[str, Any] | None = None) -> Path | None:
        return super().save_checkpoint(metadata={**(metadata or {}), LOG: self._log.mark()})


FOREIGN_SETTINGS: dict[str, Any] = {
    "model_device": "cpu",
    "max_seq_len": WITHOUT_LIMIT,
    "micro_token_budget": WITHOUT_LIMIT,
    "packing": "greedy",
}


def make_checkpointer(backend: PyTorchTrainingBackend, every: int) -> CheckpointManager:
    keep = backend.checkpoints.cfg.max_to_keep
    return CheckpointManager(CheckpointConfig(backend.checkpoint_dir, every_n_steps=every, max_to_keep=keep))


def find_checkpoint(checkpointer: CheckpointManager | None) -> str | None:
    """The newest undamaged checkpoint; None, with a warning, if there is none to resume."""
    if checkpointer is None:
        raise ConfigError(
            "resume=True needs a PyTorchTrainingBackend, whose checkpoints hold the state of the run; load your backend's own checkpoint "
            "before the call, and leave resume out"
        )
    if not checkpointer.has_any():
        logger.warning("%s has no checkpoint to resume; the run begins at step 0", checkpointer.root)
        return None
    return str(checkpointer.find())


@dataclass
class LoopLog:
    """The metrics of a run: one mapping for each step, of which every `log_every`-th and the last
    go to the logger."""

    backend: Any
    settings: LoopSettings
    metrics_logger: Any = None
    steps: list[dict[str, float]] = field(default_factory=list)
    logged: int = 0

    async def record(self, trainer: Trainer, stats: Mapping[str, float], facts: Mapping[str, float]) -> None:
        """Add a step, unless it is added, and have a backend that is not ours save it if that is
        due."""
        step = trainer.current_step
        if not self.steps or self.steps[-1]["step"] != step:
            self.add(trainer, stats, facts)
        if isinstance(trainer.backend, ForeignBackend) and step % self.settings.checkpoint_every == 0:
            self.sync()
            await trainer.backend.save_checkpoint(step, self.steps[-1])

    def add(self, trainer: Trainer, stats: Mapping[str, float], facts: Mapping[str, float]) -> None:
        """Add a step, and log it if due. `facts` belong to its batch."""
        step = trainer.current_step
        plain = {name: float(stats[key]) for key, name in PLAIN_KEYS.items() if key in stats and math.isfinite(stats[key])}
        metrics = {**stats, **plain, **facts, "step": step, "optim_step": self._optimizer_step(trainer)}
        self.steps.append(metrics)
        if step % self.settings.log_every == 0 or step == self.settings.num_steps:
            self._write(metrics)

    def sync(self) -> None:
        """Write the log to disk."""
        if isinstance(self.metrics_logger, ResumableLogger):
            try:
                self.metrics_logger.sync()
            except Exception:
                logger.exception("the metrics logger could not be synced at step %d; training goes on", self.logged)

    def mark(self) -> Any:
        """How much was logged, as a JSON value; None if the logger cannot say."""
        if isinstance(self.metrics_logger, ResumableLogger):
            try:
                return self.metrics_logger.mark()
            except Exception:
                logger.exception("the metrics logger has no mark at step %d; training goes on", self.logged)
        return None

    def note_begin(self, path: Path) -> None:
        """Write to `path` how much was logged before the run."""
        mark = self.mark()
        if mark is None:
            path.unlink(missing_ok=True)
        else:
            write_json(path, {LOG: mark})

    def cut(self, mark: Any, step: int) -> None:
        """Remove what was logged after the mark of the checkpoint of `step`."""
        if isinstance(self.metrics_logger, ResumableLogger) and mark is not None:
            try:
                self.metrics_logger.cut(mark, step)
            except Exception:
                logger.exception("lines after step %d could not be removed from the log; they will be there twice", step)

    @staticmethod
    def _optimizer_step(trainer: Trainer) -> float:
        backend = trainer.backend
        if isinstance(backend, ForeignBackend):
            return backend.last_step.get("step", trainer.current_step)
        assert isinstance(backend, PyTorchTrainingBackend)
        return backend.current_step

    def _write(self, metrics: dict[str, float]) -> None:
        self.logged = int(metrics["step"])
        if self.metrics_logger is None:
            return
        try:
            self.metrics_logger.log(metrics, step=self.logged)
        except Exception:
            logger.exception("the metrics logger failed at step %d; training goes on", self.logged)

    async def end(self, trainer: Trainer) -> None:
        """Log the last step, then save and publish its weights unless that is done."""
        self._write_last()
        if not self.steps:
            return
        await self._save(trainer)  # first: a publication that fails loses no step
        if trainer.sync_every_steps and trainer.current_step % trainer.sync_every_steps:
            await trainer.publish()

    async def end_early(self, trainer: Trainer) -> None:
        """Log the last step and save it, after an error that has left the weights as they are. If
        that fails too, the log says so."""
        self._write_last()
        try:
            await self._save(trainer)
        except Exception:
            logger.exception("step %d could not be saved after the run had failed", trainer.current_step)

    def _write_last(self) -> None:
        if self.steps and self.logged != self.steps[-1]["step"]:
            self._write(self.steps[-1])

    async def _save(self, trainer: Trainer) -> None:
        """Save the current step, unless it is saved."""
        if not isinstance(trainer.backend, ForeignBackend):
            await trainer.ensure_checkpoint()
        else:
            await trainer.backend.save_checkpoint(trainer.current_step, self.steps[-1] if self.steps else {})

    def finish(self) -> None:
        """End the metrics logger. If it fails, the run has still ended well."""
        if self.metrics_logger is None:
            return
        try:
            self.metrics_logger.finish()
        except Exception:
            logger.exception("the metrics logger could not finish")


class _BeforeCheckpoints:
    """Adds each step to the log before its checkpoint is written."""

    def __init__(self, trainer: Trainer, log: LoopLog, source: Any) -> None:
        self._trainer, self._log, self._source = trainer, log, source

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        self._log.add(self._trainer, stats, self._source.facts())

    def sync(self) -> None:
        self._log.sync()


async def train_to_end(trainer: Trainer, log: LoopLog, source: Any) -> list[dict[str, float]]:
    """Train up to `num_steps` steps in all, or until the data end. Returns the metrics of the
    steps that this process took. `source.facts()` belong to its last batch. A failure to
    generate or to publish loses no step: the last one is saved before the error is raised."""
    trainer.train_logger = _BeforeCheckpoints(trainer, log, source)
    begun = trainer.current_step
    remaining = log.settings.num_steps - begun
    try:
        if remaining > 0:
            await trainer.train(remaining, log_fn=lambda stats: log.record(trainer, stats, source.facts()))
    except RequestsExhausted as error:
        logger.info("the data ended after %d of %d steps: %s", trainer.current_step, log.settings.num_steps, error)
    except (PublishError, RolloutError, RolloutAborted):  # others may leave the weights in doubt
        if trainer.current_step > begun:
            await log.end_early(trainer)
        raise
    await log.end(trainer)
    return log.steps


def reward_facts(rewards: Sequence[float]) -> dict[str, float]:
    """`mean_reward`, `max_reward` and `min_reward`; empty without rewards."""
    if not rewards:
        return {}
    return {"mean_reward": math.fsum(rewards) / len(rewards), "max_reward": max(rewards), "min_reward": min(rewards)}
