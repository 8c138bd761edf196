"""The training loop.

A step: fetch a macro-batch (`loop.fetching`), plan it (`batching.mini_batches`), run it and step
the optimizer (`backend`), publish the weights, log (`loop.outputs`), save (`checkpoint`). Between
steps: evaluate, and stop early (`loop.evaluations`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ludic.errors import CheckpointError, ConfigError, RequestsExhausted, StopRequested
from ludic.event_loop import EventLoop, await_if_needed
from ludic.models.lora import LoraSettings, apply_lora
from ludic.models.published import ParamFilter
from ludic.training import ranks, watchdog
from ludic.training.algorithm import RLAlgorithm
from ludic.training.backend.futures import TrainFuture
from ludic.training.backend.prefix_sharing import shares_prefixes
from ludic.training.backend.protocol import TrainingBackend, with_defaults
from ludic.training.backend.torch import TorchBackend, build_optimizer
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.packing import Rows
from ludic.training.batching.source import BATCH_NUMBER, PENDING_PATIENCE_S, BatchSourceBase, as_batch_source
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.callbacks.protocol import Callback
from ludic.training.checkpoint import CheckpointConfig, CheckpointManager
from ludic.training.config import TrainerConfig
from ludic.training.controllers.protocol import Controller
from ludic.training.evaluators.protocol import Evaluator
from ludic.training.loggers.base import TrainingLogger
from ludic.training.loop.callbacks import Callbacks
from ludic.training.loop.control import Control
from ludic.training.loop.early_stopping import EarlyStopping
from ludic.training.loop.evaluations import Evaluations
from ludic.training.loop.fetching import BatchFetcher
from ludic.training.loop.outputs import publish_weights, run_operation, sync_safely
from ludic.training.loop.run_state import restore_run, run_state
from ludic.training.loop.schedule import RunSchedule
from ludic.training.loop.setup_checks import check_backend, check_setup, require_model
from ludic.training.loop.step_log import StepLog
from ludic.training.loop.step_record import StepRecord
from ludic.training.loop.timings import PhaseTimer
from ludic.training.loop.token_log import TokenLog
from ludic.training.loss.base import adapted_loss
from ludic.training.preflight.check import Preflight
from ludic.training.preflight.layouts import with_right_layout
from ludic.training.preparation import Prepared, prepare, select_comparable, skips_zero_weight
from ludic.training.reference import decide_trees, resolve_reference
from ludic.training.rng import preserved_rng
from ludic.training.stats import Reducer, default_reducers
from ludic.training.types import BatchSource, ReferencePolicy, SAWItem

if TYPE_CHECKING:
    from peft import LoraConfig

    from ludic.distributed.interfaces import PolicyPublisher

logger = logging.getLogger(__name__)
T = TypeVar("T")
Stats = dict[str, float]
LogFn = Callable[[Stats], Any]  # or a coroutine function


class Trainer:
    """Trains a model on the batches of a source.

    `model` is None if `backend` has the model elsewhere. Without `publisher` nothing is published,
    and `sync_every_steps` above 1 is an error. `lora_config` adds adapters (`apply_lora`): only
    these and the head of a scoring model are trained. `preflight` checks before the first step
    whether trainer and sampler agree, and raises if not. `reference` is for algorithms that read
    one (`training.reference`); None: the model without its adapters. `controllers` set coefficients
    of the algorithm after each step; `callbacks` are called on the way; `token_log` gets the
    log-probabilities of some batches. `total_training_steps`: length of the learning-rate schedule;
    None: `num_steps` of the first `train`. With several ranks, the source must return different
    samples on each rank (`shards_across_ranks`).

    >>> trainer = Trainer(model=model, algo=make_grpo(group_size=8), batch_source=source, cfg=cfg)
    >>> trainer.train_sync(num_steps=100)
    """

    def __init__(
        self,
        *,
        model: nn.Module | None,
        algo: RLAlgorithm,
        batch_source: BatchSource,
        publisher: PolicyPublisher | None = None,
        cfg: TrainerConfig | None = None,
        param_filter: ParamFilter | None = None,
        enable_gradient_checkpointing: bool = False,
        checkpointer: CheckpointManager | None = None,
        checkpoint_config: CheckpointConfig | None = None,
        resume_from: int | str | Path | None = None,
        train_logger: TrainingLogger | None = None,
        reducers: Mapping[str, Reducer] | None = None,
        evaluator: Evaluator | None = None,
        total_training_steps: int | None = None,
        backend: TrainingBackend | None = None,
        lora_config: LoraSettings | LoraConfig | None = None,
        preflight: Preflight | None = None,
        reference: ReferencePolicy | None = None,
        controllers: Sequence[Controller] = (),
        callbacks: Sequence[Callback] = (),
        token_log: TokenLog | None = None,
    ) -> None:
        self.cfg = TrainerConfig() if cfg is None else cfg
        self.algo, self.batch_source, self.publisher = algo, batch_source, publisher
        self.evaluator, self.train_logger, self.param_filter = evaluator, train_logger, param_filter
        self.reducers = default_reducers() if reducers is None else reducers
        self.preflight, self.token_log = preflight, token_log
        check_setup(self.cfg, self.reducers, publisher, evaluator, batch_source)
        if resume_from is not None and not (checkpointer or checkpoint_config):
            raise ConfigError(f"resume_from ({resume_from}) needs a checkpointer; pass checkpointer= or checkpoint_config=")
        self._model = model if lora_config is None else apply_lora(require_model(model), lora_config)
        self.sync_every_steps = (self.cfg.sync_every_steps or None) if publisher is not None else None
        self.backend = self._make_backend(enable_gradient_checkpointing) if backend is None else backend
        self._fetcher = BatchFetcher(self, self._ingest)
        self.checkpointer = checkpointer or (CheckpointManager(checkpoint_config) if checkpoint_config else None)
        check_backend(self.cfg, self.backend, checkpoints=self.checkpointer is not None)
        self.reference = resolve_reference(reference, algo, self.backend, self._model)
        self._begin(total_training_steps, controllers, callbacks)
        if resume_from is not None:
            self._resume(resume_from)
        decide_trees(self.backend, self.reference, self.cfg)

    def _make_backend(self, gradient_checkpointing: bool) -> TrainingBackend:
        backend = TorchBackend(
            self.model,
            self.cfg,
            algo=self.algo,
            optimizer_factory=self.initialize_optimizer,
            enable_gradient_checkpointing=gradient_checkpointing,
        )
        self.cfg = with_right_layout(self.cfg, self.model)  # another backend decides itself
        return backend

    def _begin(self, total_training_steps: int | None, controllers: Sequence[Controller], callbacks: Sequence[Callback]) -> None:
        self._step, self.control, self.callbacks = 0, Control(controllers, self.algo), Callbacks(callbacks, self)
        self.schedule = RunSchedule(self.cfg, total_training_steps)
        self.evaluations = Evaluations(self)
        self._publish_before_step = False
        """Whether the publisher lacks the weights of this step."""
        self._has_new_gradient = False
        """Whether a gradient other than 0 was applied since the last push."""
        self._checkpoint_s = 0.0
        self._step_log, self._event_loop = StepLog(self), EventLoop()

    def initialize_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer for the model on its device. A subclass can override this."""
        return build_optimizer(self.model, self.cfg)

    @property
    def model(self) -> nn.Module:
        """The model in this process. Raises ConfigError if the backend has it elsewhere."""
        return require_model(self._model)

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = model

    @property
    def source(self) -> BatchSourceBase:
        """`batch_source`, with defaults for the optional members that it lacks."""
        return as_batch_source(self.batch_source)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of a `TorchBackend`; None with another backend."""
        return with_defaults(self.backend).optimizer

    @property
    def early_stopping(self) -> EarlyStopping:
        """The best evaluation so far, and how many came after it."""
        return self.evaluations.early_stopping

    @property
    def last_eval(self) -> Stats:
        """What the last evaluation gave, as it was logged."""
        return self.evaluations.last_eval

    @property
    def current_step(self) -> int:
        """Number of steps taken; also the version of the weights."""
        return self._step

    async def train(
        self, num_steps: int | None = None, *, log_every: int = 1, log_fn: LogFn | None = None, eval_log_fn: LogFn | None = None
    ) -> None:
        """Take `num_steps` steps; None: until the source raises RequestsExhausted, StopRequested or
        StopAsyncIteration. `log_fn` gets the statistics of every `log_every`-th step, `eval_log_fn`
        those of each evaluation. A run that was killed before it evaluated its last step evaluates
        it first. A run that early stopping ended takes no step unless the patience is raised, and
        one that a callback ended none unless its last step is to be later than before."""
        last = None if num_steps is None else self._step + num_steps
        self.schedule.begin(last)
        self._step_log.begin(last)
        if not self.early_stopping.stopped:
            self.evaluations.undo_restore_best(self._has_checkpoint, self._resume)
        async with self.callbacks.until_end(last):
            while not await self._should_stop(eval_log_fn) and (last is None or self._step < last):
                try:
                    stats = await self.train_step()
                except (RequestsExhausted, StopRequested, StopAsyncIteration) as error:
                    if last is None:
                        await self.callbacks.end_if_requested(error)
                        return
                    raise
                if log_fn is not None and self._step % log_every == 0:
                    await await_if_needed(log_fn(stats))

    async def _should_stop(self, log_fn: LogFn | None) -> bool:
        """Whether early stopping or a callback ends the run. A due evaluation comes first."""
        if self.evaluations.is_due():
            if self._publish_before_step:
                await self.publish()  # the evaluator may sample from a server, which needs these weights
            await self.evaluations.record((await self.eval(log_fn=log_fn))["metrics"])
        return await self.evaluations.end_if_stopped() or await self.callbacks.end_if_stopped()

    def restore_best(self) -> int | None:
        """Set the weights to those of the best evaluation, unpublished; `train` does so if early
        stopping ends it. Returns their step, or None. A later `train` resumes at `current_step`."""
        return self.evaluations.restore_best()

    def _check_early_stopping(self, metric: float) -> tuple[bool, bool]:  # documented, for subclasses
        return self.early_stopping.update(metric)

    @watchdog.watched("step")
    async def train_step(self) -> Stats:
        """Train on one macro-batch, in one or more optimizer steps. Returns its statistics, with
        prefixed keys."""
        timer = PhaseTimer()
        if self._checkpoint_s:
            timer.add("checkpoint", self._checkpoint_s)
            self._checkpoint_s = 0.0
        self.schedule.warn_once_if_guessed()
        if self._publish_before_step:
            await self.publish(timer)
        batch, macro = await self._fetcher.fetch(self._step, timer)
        await self._check_sampler(macro)
        with timer.phase("forward_backward"):
            prepared = await prepare(self, macro, batch.meta[BATCH_NUMBER])
        macro = prepared.macro
        record = StepRecord(batch, macro, timer, prepared.stats)
        for epoch in range(self.cfg.epochs_per_batch):
            for rows in macro.divide(self.cfg.minibatches_per_batch, seed=self.cfg.seed, step=self._step, epoch=epoch):
                with timer.phase("batching"):
                    mini_batch = self._make_mini_batch(macro, rows)
                if len(mini_batch):
                    await self._optimize(mini_batch, record, first_epoch=epoch == 0)
                record.add_padding(mini_batch)
        self._step += 1
        with_defaults(self.backend).note_step(self._step)
        if self.sync_every_steps and self._step % self.sync_every_steps == 0:
            await self.publish(timer)
        stats = self._log_step(record, prepared)
        await self.callbacks.on_step(stats, batch)
        await self._checkpoint()
        return stats

    def _ingest(self, items: Sequence[SAWItem]) -> MacroBatch:
        """Truncate samples and drop those without actions. A subclass may keep some together."""
        merge_turns = self.cfg.merge_turns and adapted_loss(self.algo).reads_shared_only
        return MacroBatch.ingest(items, self.cfg.max_seq_len, merge_turns=merge_turns)

    def _make_mini_batch(self, macro: MacroBatch, rows: Rows) -> MiniBatch:
        """The samples at `rows`, split into micro-batches, which are collated one by one."""
        gathers = bool(adapted_loss(self.algo).gathers)
        kind = TreeMiniBatch if shares_prefixes(self.backend, self.cfg) else MiniBatch
        return kind(macro, rows, self.cfg, skip_zero_weight=skips_zero_weight(self), with_positions=gathers)

    async def _optimize(self, mini_batch: MiniBatch, record: StepRecord, *, first_epoch: bool) -> None:
        at_start = first_epoch and (record.optimizer_steps == 0 or "proximal_logps" in mini_batch.batch.token_columns)
        with record.timer.phase("forward_backward"):
            result = await self._compute(lambda backend: backend.forward_backward(mini_batch, totals=mini_batch.totals))
        with record.timer.phase("optimizer"):
            step = await self._compute(lambda backend: backend.optim_step(lr_factor=self.schedule.factor(self._step)))
        self._has_new_gradient |= step["grad_norm"] > 0
        record.add(result, step, at_step_start=at_start)

    async def _compute(self, operation: Callable[[TrainingBackend], TrainFuture[T]]) -> T:
        return await run_operation(self.backend, operation, overlaps=self.source.overlaps)

    async def _check_sampler(self, macro: MacroBatch) -> None:
        """Run `preflight` once, on the first samples to train on; if one rank fails, all stop."""
        check, self.preflight = self.preflight, None
        if check is not None:
            with preserved_rng():
                await check(self.backend, self.cfg, select_comparable(self.algo, macro.items))

    @watchdog.watched("publish")
    async def publish(self, timer: PhaseTimer | None = None) -> None:
        """Publish the weights as version `current_step`."""
        if self.publisher is None:
            raise ConfigError("there is no PolicyPublisher to publish with; pass publisher= to Trainer")
        with (timer or PhaseTimer()).phase("publish"):
            expect_change, self._has_new_gradient = self._has_new_gradient, False
            await publish_weights(
                self.backend,
                self.publisher,
                param_filter=self.param_filter,
                version=self._step,
                expect_change=expect_change,
                in_thread=self.source.overlaps,
            )
        self._publish_before_step = False

    async def _checkpoint(self) -> None:
        """Save if a checkpoint is due. The step is logged before, so that no step is in a
        checkpoint and not in the log; the log line of the next step has the seconds."""
        if self.checkpointer is not None and (self.callbacks.take_save_request() | self.checkpointer.should_save(self._step)):
            started = time.perf_counter()
            await self._save_with_pending(PENDING_PATIENCE_S)
            self._checkpoint_s = time.perf_counter() - started

    async def ensure_checkpoint(self, *, patience_s: float = PENDING_PATIENCE_S) -> None:
        """Save a checkpoint of the current step, unless there is one or no checkpointer. Waits up
        to `patience_s` seconds for batches that are being generated."""
        if self.checkpointer is not None and not self._has_checkpoint():
            await self._save_with_pending(patience_s)

    @watchdog.watched("save")
    async def _save_with_pending(self, patience_s: float) -> None:
        await self.source.finish_pending(patience_s)
        folder = self.save_checkpoint()
        await self.source.checkpoint_saved()
        await self.callbacks.on_checkpoint(folder)

    def _has_checkpoint(self) -> bool:
        """Whether there is an undamaged checkpoint of the current step. All ranks call it."""
        checkpointer, step = self.checkpointer, self._step
        return checkpointer is not None and ranks.ask_rank_0(
            f"looking for the checkpoint of step {step}", lambda: checkpointer.holds(step)
        )

    def save_checkpoint(self, *, metadata: Mapping[str, Any] | None = None) -> Path | None:
        """Write weights, optimizer and the state of the run. Returns the folder on rank 0, None on
        other ranks."""
        if self.checkpointer is None:
            raise CheckpointError("the trainer has no checkpointer; pass checkpointer= or checkpoint_config=")
        if self.evaluations.has_best_weights and self._has_checkpoint():
            return self.checkpointer.find(step=self._step)  # which has the weights of the last step, to continue from
        sync_safely(self.train_logger, self._step)
        content = {**(metadata or {}), "algorithm": self.algo.name, **run_state(self, self.source)}
        return self.checkpointer.save_backend(self.backend, step=self._step, metadata=content, **self.control.files(self._step))

    @watchdog.watched("load")
    def _resume(self, resume_from: int | str | Path) -> None:
        assert self.checkpointer is not None
        locate = self.checkpointer.locate
        folder = ranks.ask_rank_0(f"finding the checkpoint {resume_from}", lambda: str(locate(resume_from)))
        with ranks.agree(f"loading the checkpoint {folder}"):
            metadata = self.checkpointer.load_backend(self.backend, Path(folder))
            self._step = int(metadata["step"])
            restore_run(self, self.source, metadata)
        self._publish_before_step = bool(self.sync_every_steps)

    def _log_step(self, record: StepRecord, prepared: Prepared) -> Stats:
        """Log the step if it is due. Controllers see every step."""
        return self._step_log.log(record, prepared)

    async def eval(
        self,
        *,
        reducers: Mapping[str, Reducer] | None = None,
        max_steps: int | None = None,
        timeout_s: float | None = None,
        concurrency: int | None = None,
        log_fn: LogFn | None = None,
    ) -> dict[str, Any]:
        """Evaluate and return `records` and `metrics`. This runs on rank 0, and both are empty
        on the others, unless the evaluator has `on_all_ranks`. For an argument that is None here
        and in the config, the evaluator uses its default. Random generators keep their state."""
        if self.evaluator is None:
            raise ConfigError("the trainer has no evaluator; pass evaluator=")
        limits = self.cfg.eval_limits(max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency)
        return await self.evaluations.evaluate(self.evaluator, reducers=reducers, limits=limits, log_fn=log_fn)

    def train_sync(
        self, num_steps: int | None = None, *, log_every: int = 1, log_fn: LogFn | None = None, eval_log_fn: LogFn | None = None
    ) -> None:
        """`train` from code that is not a coroutine."""
        training = self.train(num_steps, log_every=log_every, log_fn=log_fn, eval_log_fn=eval_log_fn)
        self._event_loop.run(training, instead="trainer.train(...)")

    def train_step_sync(self) -> Stats:
        """`train_step` from code that is not a coroutine."""
        return self._event_loop.run(self.train_step(), instead="trainer.train_step()")

    def eval_sync(self, **options: Any) -> dict[str, Any]:
        """`eval` from code that is not a coroutine."""
        return self._event_loop.run(self.eval(**options), instead="trainer.eval(...)")
