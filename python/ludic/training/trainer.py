"""The training loop, and nothing else.

A step: fetch a macro-batch, cut and plan it (`batching.mini_batches`), run it and step the
optimizer (`backend`), publish the weights, keep a checkpoint, log. What a step measures is in
`step_record`, what a checkpoint holds of the run in `run_state`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ludic.errors import CheckpointError, ConfigError, EmptyBatchError, RequestsExhausted, StopRequested
from ludic.event_loop import EventLoop, await_if_needed
from ludic.inference.publishing import Publisher, as_publisher
from ludic.models.lora import LoraSettings, apply_lora
from ludic.models.published import ParamFilter
from ludic.training import ranks
from ludic.training.algorithm import RLAlgorithm
from ludic.training.backend.futures import TrainFuture
from ludic.training.backend.protocol import TrainingBackend
from ludic.training.backend.torch import TorchBackend, build_optimizer
from ludic.training.batching.micro_batching import MicroBatch
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch, Rows
from ludic.training.batching.source import as_batch_source
from ludic.training.checkpoint import CheckpointConfig, CheckpointManager
from ludic.training.config import TrainerConfig
from ludic.training.evaluators.protocol import Evaluator, runs_on_all_ranks
from ludic.training.loggers.base import SyncedLogger, TrainingLogger
from ludic.training.loop.best_weights import BestWeights
from ludic.training.loop.early_stopping import EarlyStopping, check_early_stopping
from ludic.training.loop.proximal import with_proximal_logps
from ludic.training.loop.run_state import evaluation_state, restore_run, run_state
from ludic.training.loop.schedule import LearningRateSchedule
from ludic.training.loop.signal_watch import SignalWatch
from ludic.training.loop.step_record import StepRecord
from ludic.training.loop.timings import PhaseTimer
from ludic.training.loop.trainer_checks import check_evaluator, check_lag, check_publisher, check_ranks, warn_of_endless_schedule
from ludic.training.preflight.check import Preflight
from ludic.training.preflight.packing import with_supported_packing
from ludic.training.rng import preserved_rng
from ludic.training.stats import Reducer, check_reducers, default_reducers, distinct_rollouts, group_keys
from ludic.training.types import BatchSource, SAWBatch, SAWItem

if TYPE_CHECKING:
    from peft import LoraConfig

    from ludic.distributed.interfaces import PolicyPublisher

logger = logging.getLogger(__name__)

T = TypeVar("T")
Stats = dict[str, float]
LogFn = Callable[[Stats], Any]
"""A plain or a coroutine function."""


class Trainer:
    """Trains a model on the batches of a source.

    >>> trainer = Trainer(model=model, algo=make_grpo(group_size=8), batch_source=source, publisher=publisher, cfg=cfg)
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
    ) -> None:
        """`model` is None where `backend` has it elsewhere. Without `publisher` nothing is
        published, and asking for `sync_every_steps` above 1 is an error; without `evaluator`
        nothing is evaluated. With `lora_config`, the model gets adapters (`apply_lora`), and only
        those and the head of a model that scores are trained. `preflight` compares the first
        samples with their sampler before the first step, and raises where the two disagree.

        With several ranks the source must give each samples of its own: one that says it does not
        is refused, one that does not say is warned of (`shards_across_ranks`).

        `total_training_steps` is where the learning-rate schedule ends; without it, the `num_steps`
        of the first `train`.
        """
        self.cfg = TrainerConfig() if cfg is None else cfg
        self.algo, self.batch_source, self.publisher = algo, batch_source, publisher
        self._source = as_batch_source(batch_source)
        self.evaluator, self.train_logger, self.param_filter = evaluator, train_logger, param_filter
        self.reducers = default_reducers() if reducers is None else reducers
        self.preflight = preflight
        self._check(checkpointer or checkpoint_config, resume_from)
        self._model = model if lora_config is None else apply_lora(self._required(model), lora_config)
        self.sync_every_steps = (self.cfg.sync_every_steps or None) if publisher is not None else None
        self.backend: TrainingBackend = backend or TorchBackend(
            self._required(self._model),
            self.cfg,
            algo=algo,
            optimizer_factory=self.initialize_optimizer,
            enable_gradient_checkpointing=enable_gradient_checkpointing,
        )
        if backend is None:  # another one has its own way to keep sequences apart
            self.cfg = with_supported_packing(self.cfg, self.model)
        self.checkpointer = checkpointer or (CheckpointManager(checkpoint_config) if checkpoint_config else None)
        self.schedule = LearningRateSchedule.from_config(self.cfg, total_training_steps)
        self.early_stopping = EarlyStopping(self.cfg)
        self._best_weights = BestWeights(self.backend, None if self.checkpointer is None else self.checkpointer.root)
        self._schedule_is_open = self._schedule_is_guessed = total_training_steps is None
        self._step = 0
        self.last_eval: Stats = {}
        """What the last evaluation gave, as it was logged."""
        self.evaluated_step: int | None = None
        """Of the last evaluation that `eval_at_start` or `eval_every_n_steps` asked for."""
        self._event_loop = EventLoop()
        self._signal = SignalWatch()
        self._publish_first = False
        self._shows_best = False
        """Whether the model has the weights of the best evaluation, and not those of the last
        step."""
        self._gradient_came = False
        """Since the last push."""
        self._checkpoint_s = 0.0
        if resume_from is not None:
            self._resume(resume_from)

    def _check(self, checkpoints: object, resume_from: object) -> None:
        self.cfg.validate()
        check_early_stopping(self.cfg)
        check_reducers(self.reducers)
        check_publisher(self.cfg, self.publisher)
        check_evaluator(self.cfg, self.evaluator)
        check_lag(self.cfg, self._source.max_lag)
        check_ranks(self.batch_source)
        if resume_from is not None and checkpoints is None:
            raise ConfigError(f"resume_from ({resume_from}) needs a checkpointer; pass checkpointer= or checkpoint_config=")

    def initialize_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the model where it now is; a subclass may group its parameters."""
        return build_optimizer(self.model, self.cfg)

    @property
    def model(self) -> nn.Module:
        """The model in this process. Raises ConfigError where the backend has it elsewhere."""
        return self._required(self._model)

    @staticmethod
    def _required(model: nn.Module | None) -> nn.Module:
        if model is None:
            raise ConfigError("the trainer has no model in this process; pass model=, or leave what needs it to the backend")
        return model

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """That of a `TorchBackend`; another backend keeps its own to itself."""
        return self.backend.optimizer if isinstance(self.backend, TorchBackend) else None

    @property
    def current_step(self) -> int:
        """Steps done, which is also the version of the weights."""
        return self._step

    async def train(
        self,
        num_steps: int | None = None,
        *,
        log_every: int = 1,
        log_fn: LogFn | None = None,
        eval_log_fn: LogFn | None = None,
    ) -> None:
        """Take `num_steps` steps; None: until the source raises RequestsExhausted, StopRequested or
        StopAsyncIteration.

        `log_fn` gets the statistics of every `log_every`-th step, `eval_log_fn` those of each
        evaluation. A run that was killed before it evaluated its last step does so first; one that
        early stopping ended takes no step, unless it is given more patience.
        """
        if num_steps is not None and self._schedule_is_open and self.cfg.lr_scheduler_type is not None:
            self.schedule = LearningRateSchedule.from_config(self.cfg, self._step + num_steps)
            self._schedule_is_guessed = False
        self._schedule_is_open = False
        last = None if num_steps is None else self._step + num_steps
        if not self.early_stopping.stopped:
            self._go_on_from_last()
        while not await self._evaluated_enough(eval_log_fn) and (last is None or self._step < last):
            try:
                stats = await self.train_step()
            except (RequestsExhausted, StopRequested, StopAsyncIteration):
                if last is None:
                    return
                raise
            if log_fn is not None and self._step % log_every == 0:
                await await_if_needed(log_fn(stats))

    async def _evaluated_enough(self, log_fn: LogFn | None) -> bool:
        """Evaluate if it is time and this step has not been; whether training is to stop."""
        if self._owes_evaluation:
            if self._publish_first:
                await self.publish()  # an evaluator may ask those who were given the weights
            metrics = (await self.eval(log_fn=log_fn))["metrics"]
            if self._step > 0 and self.early_stopping.take_note(metrics, self._step, self.cfg.model_device):
                self._best_weights.keep(self._step)
            self.evaluated_step = self._step
            if self.checkpointer is not None:
                self._sync_log()
                self.checkpointer.amend(self._step, evaluation_state(self))
        if self.early_stopping.stopped:
            self._end_early()
        return self.early_stopping.stopped

    def _end_early(self) -> None:
        """A checkpoint of the run's end, for one that goes on with more patience; then the best
        weights."""
        if self.checkpointer is not None and not self.checkpointer.holds(self._step):
            self.save_checkpoint()
        self.restore_best()

    def restore_best(self) -> int | None:
        """Put back the weights of the best evaluation: its step, or None where none is known.
        `train` does so itself where early stopping ends it; a run that came to its end otherwise
        may have been better before, too. They are not published. A later `train` goes on from
        the checkpoint of `current_step`."""
        step = self.early_stopping.best_step
        if step is None:
            return None
        if not self._best_weights.restore(step):
            logger.warning(
                "the weights of step %d, of the best evaluation, are not there; those of step %d stay", step, self._step
            )
            return None
        self._shows_best = True
        return step

    def _go_on_from_last(self) -> None:
        """Undo `restore_best`."""
        if not self._shows_best:
            return
        if self.checkpointer is not None and self.checkpointer.holds(self._step):
            self._resume(self._step)
        else:
            logger.warning("training goes on from the best weights: there is no checkpoint of step %d", self._step)
        self._shows_best = False

    @property
    def _owes_evaluation(self) -> bool:
        """A checkpoint is written before its step is evaluated; a run that was killed in between
        makes up for it."""
        every = self.cfg.eval_every_n_steps
        due = self.cfg.eval_at_start if self._step == 0 else every is not None and self._step % every == 0
        return self.evaluator is not None and due and self.evaluated_step != self._step

    def _check_early_stopping(self, metric: float) -> tuple[bool, bool]:
        """Take note of an evaluation: whether to stop, and whether it is an improvement."""
        return self.early_stopping.update(metric)

    def resume_schedule(self, total_steps: int) -> None:
        """Go on with the schedule of the run that is resumed, which the next `train` does not
        stretch."""
        self.schedule = LearningRateSchedule.from_config(self.cfg, total_steps)
        self._schedule_is_open = self._schedule_is_guessed = False

    async def train_step(self) -> Stats:
        """One macro-batch: one optimizer step, or several if the config says so. Its statistics,
        grouped by prefix."""
        timer = PhaseTimer()
        if self._checkpoint_s:
            timer.add("checkpoint", self._checkpoint_s)
            self._checkpoint_s = 0.0
        if self._schedule_is_guessed:
            self._schedule_is_guessed = False
            warn_of_endless_schedule(self.cfg, self.schedule.total_steps)
        if self._publish_first:
            await self.publish(timer)
        batch, macro = await self._next_batch(timer)
        await self._check_sampler(macro)
        macro = await self._with_proximal(macro, timer)
        record = StepRecord(batch, macro, timer)
        for epoch in range(self.cfg.epochs_per_batch):
            for rows in macro.divide(self.cfg.minibatches_per_batch, seed=self.cfg.seed, step=self._step, epoch=epoch):
                with timer.phase("batching"):
                    mini_batch = self._mini_batch(macro, rows)
                if len(mini_batch):
                    await self._optimize(mini_batch, record, first_epoch=epoch == 0)
                record.add_padding(mini_batch)
        self._step += 1
        if self.sync_every_steps and self._step % self.sync_every_steps == 0:
            await self.publish(timer)
        stats = self._logged(record)
        self._checkpoint()
        return stats

    def _ingest(self, items: Sequence[SAWItem]) -> MacroBatch:
        """The samples of a batch, cut, without those that have nothing to train; a subclass may
        keep some together."""
        return MacroBatch.ingest(items, self.cfg.max_seq_len, merge_turns=self._merges_turns)

    def _mini_batch(self, macro: MacroBatch, rows: Rows) -> MiniBatch:
        """The samples at `rows`, split into micro-batches and collated as they are asked for."""
        return MiniBatch(macro, rows, self.cfg, skip_zero_weight=self._skips_zero_weight)

    @property
    def _skips_zero_weight(self) -> bool:
        return self.cfg.skip_zero_weight and self.algo.loss.zero_weight_is_zero_gradient

    @property
    def _merges_turns(self) -> bool:
        return self.cfg.merge_turns and self.algo.loss.reads_shared_only

    async def _next_batch(self, timer: PhaseTimer) -> tuple[SAWBatch, MacroBatch]:
        """A batch with something to train on."""
        fetched = stale = 0
        for attempt in range(self.cfg.max_empty_batches):
            with timer.phase("rollout"):
                given = await self._source.next_batch()
            with timer.phase("batching"):
                batch = SAWBatch([item for item in given.items if not self._is_stale(item.meta)], given.meta)
                fetched, stale = fetched + len(given.items), stale + len(given.items) - len(batch.items)
                if self.algo.preprocess is not None and batch.items:
                    batch = await await_if_needed(self.algo.preprocess(batch))
                macro = self._ingest(batch.items)
            if macro.items:
                self._signal.look(macro.items)
                batch.items = macro.items
                batch.meta["effective_rollouts"] = distinct_rollouts(macro.items)
                batch.meta.update(self._lag(macro.items))
                return batch, macro
            if attempt == 0:  # the error has the number of those that follow
                logger.warning(
                    "a batch of %d samples has none to train on%s; fetching others", len(given.items), self._too_long(given.items)
                )
        raise EmptyBatchError(
            f"{self.cfg.max_empty_batches} batches in a row had no sample to train on: {fetched} samples came, {stale} were older than "
            f"max_lag ({self.cfg.max_lag}), preprocessing and truncation dropped the rest{self._too_long(given.items)}; check the source "
            "and the filters, or raise max_empty_batches"
        )

    def _too_long(self, items: Sequence[SAWItem]) -> str:
        """Said of samples whose prompts alone are longer than what is trained."""
        prompts = [list(item.action_mask).index(1) for item in items if any(item.action_mask)]
        if not prompts or min(prompts) < self.cfg.max_seq_len:
            return ""
        return f" (the shortest prompt has {min(prompts)} tokens, and max_seq_len is {self.cfg.max_seq_len}: raise that)"

    def _is_stale(self, meta: Mapping[str, Any]) -> bool:
        version = meta.get("policy_version")
        return self.cfg.max_lag is not None and version is not None and self._step - version > self.cfg.max_lag

    def _lag(self, items: Sequence[SAWItem]) -> dict[str, float]:
        """How many versions the samples are behind the weights, on average; nothing where
        versions are not published or not known."""
        versions = [item.meta["policy_version"] for item in items if item.meta.get("policy_version") is not None]
        return {"policy_lag": self._step - sum(versions) / len(versions)} if versions and self.sync_every_steps else {}

    async def _optimize(self, mini_batch: MiniBatch, record: StepRecord, *, first_epoch: bool) -> None:
        at_start = first_epoch and (record.optimizer_steps == 0 or mini_batch.batch.proximal is not None)
        with record.timer.phase("forward_backward"):
            result = await self._compute(lambda: self.backend.forward_backward(mini_batch, totals=mini_batch.totals))
        with record.timer.phase("optimizer"):
            step = await self._compute(lambda: self.backend.optim_step(lr_factor=self.schedule.factor(self._step)))
        self._gradient_came |= step["grad_norm"] > 0
        record.add(result, step, at_step_start=at_start)

    async def _compute(self, operation: Callable[[], TrainFuture[T]]) -> T:
        """What the backend gives. Where batches are generated meanwhile, it computes in a
        thread, and the event loop is theirs."""
        future = await asyncio.to_thread(operation) if self._source.overlaps else operation()
        return await future.result()

    async def _with_proximal(self, macro: MacroBatch, timer: PhaseTimer) -> MacroBatch:
        """A correction needs the log-probabilities of the step's beginning; from the second
        optimizer step on they must be kept."""
        if self.algo.correction is None or self.cfg.minibatches_per_batch * self.cfg.epochs_per_batch == 1:
            return macro

        async def forward(micro_batch: MicroBatch) -> torch.Tensor:
            return await self._compute(lambda: self.backend.forward_logprobs(micro_batch))

        with timer.phase("forward_backward"):
            return await with_proximal_logps(macro, self.cfg, forward, skip_zero_weight=self._skips_zero_weight)

    async def _check_sampler(self, macro: MacroBatch) -> None:
        """Once, with the first samples that are trained. All ranks stop where one of them has
        to."""
        check, self.preflight = self.preflight, None
        if check is not None:
            with preserved_rng():
                await check(self.backend, self.cfg, macro.items)

    async def publish(self, timer: PhaseTimer | None = None) -> None:
        """Hand the weights to the publisher as version `current_step`."""
        if self.publisher is None:
            raise ConfigError("there is no PolicyPublisher to publish with; pass publisher= to Trainer")
        with (timer or PhaseTimer()).phase("publish"):
            weights = await self.backend.export_weights(param_filter=self.param_filter).result()
            if ranks.rank() == 0:
                await self._push(as_publisher(self.publisher), weights)
            ranks.barrier()
        self._publish_first = False

    async def _push(self, publisher: Publisher, weights: Mapping[str, torch.Tensor]) -> None:
        """To the publisher; in a thread while batches are generated, which go on meanwhile."""
        publisher.expect_change(self._gradient_came)
        self._gradient_came = False
        push = functools.partial(publisher.publish, weights, version=self._step)
        await await_if_needed(await asyncio.to_thread(push) if self._source.overlaps else push())

    def _checkpoint(self) -> None:
        """After the line of its step, so that no step is in a checkpoint and not in the log. Its
        seconds are in the line of the next."""
        if self.checkpointer is not None and self.checkpointer.should_save(self._step):
            timer = PhaseTimer()
            with timer.phase("checkpoint"):
                self.save_checkpoint()
            self._checkpoint_s = timer.seconds("checkpoint")

    def save_checkpoint(self, *, metadata: Mapping[str, Any] | None = None) -> Path | None:
        """Write weights, optimizer and the state of the run; the folder, None on other ranks
        than 0."""
        if self.checkpointer is None:
            raise CheckpointError("the trainer has no checkpointer; pass checkpointer= or checkpoint_config=")
        if self._shows_best and self.checkpointer.holds(self._step):
            return self.checkpointer.find(step=self._step)  # it has the weights of the last step, from which a run goes on
        self._sync_log()
        content = {**(metadata or {}), "algorithm": self.algo.name, **run_state(self, self._source)}
        return self.checkpointer.save_backend(self.backend, step=self._step, metadata=content)

    def _resume(self, resume_from: int | str | Path) -> None:
        assert self.checkpointer is not None
        is_step = isinstance(resume_from, int) or (str(resume_from).isdigit() and not Path(resume_from).exists())
        where: dict[str, Any] = {"step": int(str(resume_from))} if is_step else {"path": resume_from}
        metadata = self.checkpointer.load_backend(self.backend, **where)
        self._step = int(metadata["step"])
        restore_run(self, self._source, metadata)
        self._publish_first = bool(self.sync_every_steps)

    def _logged(self, record: StepRecord) -> Stats:
        if self._step % self.cfg.log_every:
            return {"train/step": float(self._step)}
        stats = record.stats(self.reducers, self.cfg)
        grouped = group_keys({"train_step": float(self._step), **stats})
        self._log(grouped)
        return grouped

    def _log(self, stats: Stats) -> None:
        """A logger that fails does not end the run."""
        if self.train_logger is None or ranks.rank() != 0:
            return
        try:
            self.train_logger.log(self._step, stats)
        except Exception:
            logger.exception("the logger failed at step %d; training goes on", self._step)

    def _sync_log(self) -> None:
        """What was logged is on disk before a checkpoint says that it is done."""
        log: object = self.train_logger
        if isinstance(log, SyncedLogger) and ranks.rank() == 0:
            try:
                log.sync()
            except Exception:
                logger.exception("the logger could not be synced at step %d; training goes on", self._step)

    async def eval(
        self,
        *,
        reducers: Mapping[str, Reducer] | None = None,
        max_steps: int | None = None,
        timeout_s: float | None = None,
        concurrency: int | None = None,
        log_fn: LogFn | None = None,
    ) -> dict[str, Any]:
        """Evaluate on rank 0: `records` and `metrics`, empty on the others; on all ranks with an
        evaluator that says `on_all_ranks`. What is not given here or in the config is the
        evaluator's to decide. Random generators are left as they were."""
        if self.evaluator is None:
            raise ConfigError("the trainer has no evaluator; pass evaluator=")
        records: list[Any] = []
        metrics: Stats = {}
        if ranks.rank() == 0 or runs_on_all_ranks(self.evaluator):
            with preserved_rng():
                records, metrics = await self.evaluator.eval(
                    reducers=reducers,
                    max_steps=self._eval_setting("eval_max_steps", max_steps),
                    timeout_s=self._eval_setting("eval_timeout_s", timeout_s),
                    concurrency=self._eval_setting("eval_concurrency", concurrency),
                )
            self.last_eval = {f"eval/{name}": value for name, value in metrics.items()} | {"eval/step": float(self._step)}
            self._log(self.last_eval)
            if log_fn is not None and ranks.rank() == 0:
                await await_if_needed(log_fn(self.last_eval))
        ranks.barrier()
        return {"records": records, "metrics": metrics}

    def _eval_setting(self, name: str, explicit: float | None) -> Any:
        if explicit is not None or not self.cfg.given(name):
            return explicit
        return getattr(self.cfg, name)

    def train_sync(
        self,
        num_steps: int | None = None,
        *,
        log_every: int = 1,
        log_fn: LogFn | None = None,
        eval_log_fn: LogFn | None = None,
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
