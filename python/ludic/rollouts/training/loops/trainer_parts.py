"""The parts of a `Trainer` that the loops build: source, credit, publisher, and the log of the run.

AsyncRolloutManager -> ManagerSource -> LoopTrainer -> EnginePublisher -> engines
                                             |
                                          LoopLog -> metrics logger
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ludic.distributed.engines import sync_returned_engines, sync_weights_to_engines
from ludic.errors import ConfigError, PublishError, RequestsExhausted, RolloutAborted, RolloutError
from ludic.event_loop import await_if_needed
from ludic.files.atomic import delete_folder, read_json, write_json
from ludic.files.checkpoints import STATE
from ludic.inference.client import PolicyPublisher, Publisher, Version
from ludic.rollouts.training.backends.protocol import ForeignBackend
from ludic.rollouts.training.backends.pytorch import WITHOUT_LIMIT, PyTorchTrainingBackend
from ludic.rollouts.training.metrics import ResumableLogger
from ludic.rollouts.training.types import RLTrainingConfig, SFTTrainingConfig
from ludic.training import ranks
from ludic.training.algorithm import RLAlgorithm
from ludic.training.backend.saving import save_weights_alone
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
    **settings: Any,
) -> LoopTrainer:
    """The trainer of a loop. With `resume` it goes on from the newest checkpoint of the backend, if
    there is one, and what was logged after it is removed. `settings`: fields of `TrainerConfig`."""
    own = backend if isinstance(backend, PyTorchTrainingBackend) else None
    base = own.cfg if own else TrainerConfig(**FOREIGN_SETTINGS)
    trained: Any = backend
    loss = own.algo.loss if own else OwnLoss()
    checkpointer = None
    if own:
        every, keep = log.config.checkpoint_every, own.checkpoints.cfg.max_to_keep
        checkpointer = CheckpointManager(CheckpointConfig(own.checkpoint_dir, every_n_steps=every, max_to_keep=keep))
    folder = find_checkpoint(checkpointer) if resume else None
    trainer = LoopTrainer(
        log,
        model=own.model if own else None,
        algo=RLAlgorithm(name=own.algo.name if own else "foreign", credit_assigner=credit or ConstantCredit(1.0), loss=loss),
        batch_source=SharedBatches(source) if ranks.is_distributed() else source,
        publisher=publisher,
        cfg=replace(base, seed=log.config.seed, **settings),
        backend=trained,
        checkpointer=checkpointer,
        resume_from=folder,
        total_training_steps=log.config.num_steps,
    )
    if checkpointer is not None and ranks.rank() == 0:
        begin = checkpointer.root / LOG_BEGIN
        if folder is not None:
            log.cut(read_json(Path(folder) / STATE).get(LOG), trainer.current_step)
        elif resume and begin.exists():  # killed before its first checkpoint
            log.cut(read_json(begin).get(LOG), 0)
        elif (mark := log.mark()) is not None:
            write_json(begin, {LOG: mark})
        else:
            begin.unlink(missing_ok=True)
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


def find_checkpoint(checkpointer: CheckpointManager | None) -> str | None:
    """The newest undamaged checkpoint; None, with a warning, if there is none to resume."""
    if checkpointer is None:
        raise ConfigError("resume=True needs a PyTorchTrainingBackend; with another one, load its checkpoint before the call")
    if not checkpointer.has_any():
        logger.warning("%s has no checkpoint to resume; the run begins at step 0", checkpointer.root)
        return None
    return str(checkpointer.find())


@contextmanager
def _logs_errors(message: str, *values: Any) -> Iterator[None]:
    """An error of the body is logged, and the run goes on."""
    try:
        yield
    except Exception:
        logger.exception(message, *values)


class LoopLog:
    """The metrics of a run: one mapping for each step, of which every `log_every`-th and the last
    go to the metrics logger. It is the trainer's logger too, so that each step is added before its
    checkpoint is written."""

    def __init__(self, config: SFTTrainingConfig | RLTrainingConfig, metrics_logger: Any = None) -> None:
        self.config, self.metrics_logger = config, metrics_logger
        self.steps: list[dict[str, float]] = []
        self.logged = 0

    async def train(self, trainer: Trainer, source: Any) -> list[dict[str, float]]:
        """Train up to `num_steps` steps in all, or until the data end. Returns the metrics of the
        steps that this process took. `source.facts()` belong to its last batch. A failure to
        generate or to publish loses no step: the last one is saved before the error is raised."""
        self.trainer, self.source = trainer, source
        trainer.train_logger = self
        begun = trainer.current_step
        try:
            if begun < self.config.num_steps:
                await trainer.train(self.config.num_steps - begun, log_fn=self._record)
        except RequestsExhausted as error:
            logger.info("the data ended after %d of %d steps: %s", trainer.current_step, self.config.num_steps, error)
        except (PublishError, RolloutError, RolloutAborted):  # others may leave the weights in doubt
            if trainer.current_step > begun:
                self._write_last()
                with _logs_errors("step %d could not be saved after the run had failed", trainer.current_step):
                    await self._save()
            raise
        self._write_last()
        if self.steps:
            await self._save()  # first: a publication that fails loses no step
            if trainer.sync_every_steps and trainer.current_step % trainer.sync_every_steps:
                await trainer.publish()
        return self.steps

    async def _record(self, stats: Mapping[str, float]) -> None:
        """Add a step, unless it is added, and have a backend that is not ours save it if that is
        due."""
        step, backend = self.trainer.current_step, self.trainer.backend
        if not self.steps or self.steps[-1]["step"] != step:
            self.log(step, stats)
        if isinstance(backend, ForeignBackend) and step % self.config.checkpoint_every == 0:
            self.sync()
            await backend.save_checkpoint(step, self.steps[-1])

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        """Add a step, and log it if due."""
        backend: Any = self.trainer.backend
        taken = backend.last_step.get("step", step) if isinstance(backend, ForeignBackend) else backend.current_step
        plain = {name: float(stats[key]) for key, name in PLAIN_KEYS.items() if key in stats and math.isfinite(stats[key])}
        self.steps.append({**stats, **plain, **self.source.facts(), "step": step, "optim_step": taken})
        if step % self.config.log_every == 0 or step == self.config.num_steps:
            self._write(self.steps[-1])

    def sync(self) -> None:
        """Write the log to disk."""
        if isinstance(self.metrics_logger, ResumableLogger):
            with _logs_errors("the metrics logger could not be synced at step %d; training goes on", self.logged):
                self.metrics_logger.sync()

    def mark(self) -> Any:
        """How much was logged, as a JSON value; None if the logger cannot say."""
        if isinstance(self.metrics_logger, ResumableLogger):
            with _logs_errors("the metrics logger has no mark at step %d; training goes on", self.logged):
                return self.metrics_logger.mark()
        return None

    def cut(self, mark: Any, step: int) -> None:
        """Remove what was logged after the mark of the checkpoint of `step`."""
        if isinstance(self.metrics_logger, ResumableLogger) and mark is not None:
            with _logs_errors("lines after step %d could not be removed from the log; they will be there twice", step):
                self.metrics_logger.cut(mark, step)

    def _write(self, metrics: dict[str, float]) -> None:
        self.logged = int(metrics["step"])
        if self.metrics_logger is not None:
            with _logs_errors("the metrics logger failed at step %d; training goes on", self.logged):
                self.metrics_logger.log(metrics, step=self.logged)

    def _write_last(self) -> None:
        if self.steps and self.logged != self.steps[-1]["step"]:
            self._write(self.steps[-1])

    async def _save(self) -> None:
        """Save the current step, unless it is saved."""
        trainer = self.trainer
        if isinstance(trainer.backend, ForeignBackend):
            await trainer.backend.save_checkpoint(trainer.current_step, self.steps[-1] if self.steps else {})
        else:
            await trainer.ensure_checkpoint()

    def finish(self) -> None:
        """End the metrics logger. If it fails, the run has still ended well."""
        if self.metrics_logger is not None:
            with _logs_errors("the metrics logger could not finish"):
                self.metrics_logger.finish()


def reward_facts(rewards: Sequence[float]) -> dict[str, float]:
    """`mean_reward`, `max_reward` and `min_reward`; empty without rewards."""
    if not rewards:
        return {}
    return {"mean_reward": math.fsum(rewards) / len(rewards), "max_reward": max(rewards), "min_reward": min(rewards)}


PUBLISHED = "published"
KEPT_VERSIONS = 2
"""Acknowledged versions that stay on disk: an engine goes back to the one before."""


class EnginePublisher(Publisher):
    """Writes the weights to `checkpoint_dir/published/step_NNNNNN` and has all engines load it, all
    or none; then tells the manager the version. The servers must see the folder under this path.

    An engine that is a `PolicyPublisher` gets the tensors instead, after the folder was loaded. A
    backend of the user's (`ForeignBackend`) writes a checkpoint, and engines load that.
    """

    needs_weights = False

    def __init__(self, backend: Any, engines: Sequence[Any], manager: Any) -> None:
        self._backend, self._manager = backend, manager
        own = isinstance(backend, PyTorchTrainingBackend)
        self._publishers = [engine for engine in engines if own and _gets_tensors(engine)]
        self._engines = [engine for engine in engines if engine not in self._publishers]
        self._acknowledged: list[Path] = []

    async def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> None:
        """Have every engine serve the weights of the backend as `version`. Raises PublishError if
        one does not, on all ranks; engines then serve what they served before."""
        step = int(version or 0)
        if self._engines:
            folder = await self._write(step)
            await _do_on_rank_0(
                f"syncing the weights of step {step}", lambda: sync_weights_to_engines(self._engines, str(folder))
            )
            if folder.parent.name == PUBLISHED:  # it is of ours: delete others that no engine can need any more
                self._acknowledged = [*(path for path in self._acknowledged if path != folder), folder][-KEPT_VERSIONS:]
                older = [path for path in sorted(folder.parent.glob("step_*")) if path not in self._acknowledged]
                for path in older if ranks.rank() == 0 else ():
                    delete_folder(path)
        if self._publishers:
            weights = await self._backend.export_weights()

            async def publish_tensors() -> None:
                for publisher in self._publishers:
                    await await_if_needed(publisher.publish(weights, version=version))

            await _do_on_rank_0(f"publishing the weights of step {step}", publish_tensors)
        self._manager.weights_changed(step)

    async def sync_returned(self) -> None:
        """Give engines that were restarted since the last sync its weights: the version of each
        server is queried. One that cannot be reached is queried again before the next batch."""
        for answer in await sync_returned_engines(self._engines):
            if answer is None:
                continue
            if answer["success"]:
                logger.warning("an engine came back with other weights, and has version %s again", answer["version"])
            else:
                logger.warning("an engine lacks the weights of the last sync: %s", answer["error"])

    async def _write(self, step: int) -> Path:
        if isinstance(self._backend, ForeignBackend):
            return await self._backend.save_checkpoint(step, {})
        target = self._backend.checkpoint_dir / PUBLISHED / f"step_{step:06d}"
        save = partial(save_weights_alone, self._backend, target, step, doing=f"writing the weights of step {step}")
        if ranks.is_distributed():  # its collectives stay in the thread of all others
            save()
        else:
            await asyncio.to_thread(save)
        return target


def _gets_tensors(engine: Any) -> bool:
    return isinstance(engine, PolicyPublisher) and not callable(getattr(engine, "update_weights_from_checkpoint", None))


async def _do_on_rank_0(doing: str, work: Callable[[], Awaitable[Any]]) -> None:
    """Await `work()` on rank 0 while the others wait. Its PublishError is one on all ranks, so that
    all of them save the step."""
    failure: PublishError | None = None
    with ranks.rank_0_alone(doing) as shared:
        if ranks.rank() == 0:
            try:
                await work()
            except PublishError as error:
                failure = error
                shared.append(str(error))
    if shared:
        raise failure or PublishError(f"{doing} failed on rank 0: {shared[0]}")
