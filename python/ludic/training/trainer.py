"""The training loop.

A step: fetch a macro-batch (`loop.staleness`), score and weigh it (`preparation`), plan it
(`batching.mini_batches`), run it and step the optimizer (`backend`), publish the weights, log
(`loop.step_record`), save (`checkpoint`). Between steps: evaluate, and stop early
(`loop.early_stopping`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ludic.errors import CheckpointError, ConfigError, RequestsExhausted, StopRequested
from ludic.event_loop import EventLoop, await_if_needed
from ludic.inference.client import as_publisher
from ludic.models.lora import LoraSettings, apply_lora
from ludic.models.published import ParamFilter, adapters_alone
from ludic.training import ranks, watchdog
from ludic.training.algorithm import RLAlgorithm
from ludic.training.backend.protocol import TrainingBackend, with_defaults
from ludic.training.backend.torch import TorchBackend, build_optimizer
from ludic.training.batching.mini_batches import MacroBatch, MiniBatch
from ludic.training.batching.packing import Rows
from ludic.training.batching.source import BATCH_NUMBER, PENDING_PATIENCE_S
from ludic.training.batching.tree_batches import TreeMiniBatch
from ludic.training.callbacks.base import Callback, Callbacks
from ludic.training.checkpoint import CheckpointConfig, CheckpointManager
from ludic.training.config import TrainerConfig
from ludic.training.controllers.protocol import Controller
from ludic.training.evaluators.protocol import Evaluator, eval_key, runs_on_all_ranks
from ludic.training.freed_memory import settle_memory
from ludic.training.loggers.base import TrainingLogger, sync_log
from ludic.training.loop.control import Control
from ludic.training.loop.early_stopping import BestWeights, EarlyStopping
from ludic.training.loop.profiler import TRAINING_PHASES, Profiler, Speed
from ludic.training.loop.schedule import RunSchedule
from ludic.training.loop.setup_checks import check_backend, check_setup, require_model
from ludic.training.loop.staleness import BatchFetcher, drop_stale
from ludic.training.loop.state import SOURCE, TrainerState, add_ranks, restore_of_this_rank
from ludic.training.loop.step_record import PhaseTimer, RankTimes, StepRecord, TimeLeft, TokenLog, combine_result
from ludic.training.loss.base import adapted_loss
from ludic.training.preflight.check import Preflight
from ludic.training.preflight.layouts import with_right_layout
from ludic.training.preparation import Prepared, prepare, skips_zero_weight
from ludic.training.reducers import Reducer, default_reducers
from ludic.training.reference import decide_trees, resolve_reference
from ludic.training.rng import preserved_rng, rng_state
from ludic.training.stats import prefix_keys
from ludic.training.types import BatchSource, ReferencePolicy, SAWItem

if TYPE_CHECKING:
    from peft import LoraConfig

    from ludic.distributed.interfaces import PolicyPublisher
    from ludic.training.critic import Critic

logger = logging.getLogger(__name__)
Stats = dict[str, float]
LogFn = Callable[[Stats], Any]  # or a coroutine function


class Trainer(TrainerState):
    """Trains a model on the batches of a source.

    `model` is None if `backend` has the model elsewhere. Without `publisher` nothing is published,
    and `sync_every_steps` above 1 is an error. `lora_config` adds adapters (`apply_lora`): only
    these and the head of a scoring model are trained. `preflight` checks before the first step
    whether trainer and sampler agree, and raises if not. `reference` is for algorithms that read
    one (`training.reference`). None means the model without its adapters. `critic` is for PPO: a
    model with one output for each token (`as_value_model`). None means a value head on the layers
    of the policy, whose weights the value loss does not change. `controllers` set
    coefficients of the algorithm after each step; `callbacks` are called on the way; `token_log`
    gets the log-probabilities of some batches, and `profiler` records some steps.
    `total_training_steps`: length of the learning-rate schedule. None means `num_steps` of the
    first `train`. `should_stop` is called before each batch is requested; if it returns true,
    StopRequested is raised. With several ranks, the source must return different samples on each
    rank (`shards_across_ranks`), and gets the stop (`SharedBatches(stop=...)`), so that it is the
    same on all.

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
        critic: nn.Module | None = None,
        controllers: Sequence[Controller] = (),
        callbacks: Sequence[Callback] = (),
        token_log: TokenLog | None = None,
        profiler: Profiler | None = None,
        should_stop: Callable[[], object] | None = None,
    ) -> None:
        self.cfg = TrainerConfig() if cfg is None else cfg
        self.algo, self.batch_source, self.publisher = algo, batch_source, publisher
        self.evaluator, self.train_logger, self.param_filter = evaluator, train_logger, param_filter
        self.reducers = default_reducers() if reducers is None else reducers
        self.preflight, self.token_log, self.profiler, self.should_stop = preflight, token_log, profiler, should_stop
        check_setup(self.cfg, self.reducers, publisher, evaluator, batch_source)
        if resume_from is not None and not (checkpointer or checkpoint_config):
            raise ConfigError(f"resume_from ({resume_from}) needs a checkpointer; pass checkpointer= or checkpoint_config=")
        if should_stop is not None and ranks.is_distributed():
            raise ConfigError("should_stop may differ between ranks; pass it to SharedBatches(stop=...), which asks all of them")
        self._model = model if lora_config is None else apply_lora(require_model(model), lora_config)
        self.sync_every_steps = (self.cfg.sync_every_steps or None) if publisher is not None else None
        if backend is None:
            backend = TorchBackend(
                self.model,
                self.cfg,
                algo=algo,
                optimizer_factory=self.initialize_optimizer,
                enable_gradient_checkpointing=enable_gradient_checkpointing,
            )
            self.cfg = with_right_layout(self.cfg, self.model)  # another backend decides itself
        self.backend = backend
        self._fetcher = BatchFetcher(self, self._ingest)
        self.checkpointer = checkpointer or (CheckpointManager(checkpoint_config) if checkpoint_config else None)
        check_backend(self.cfg, self.backend, checkpoints=self.checkpointer is not None)
        self.reference = resolve_reference(reference, algo, self.backend, self._model)
        self.critic = self._open_critic(critic)
        self.control, self.callbacks = Control(controllers, algo), Callbacks(callbacks, self, self.ensure_checkpoint)
        self.schedule = RunSchedule(self.cfg, total_training_steps)
        self.early_stopping, self.last_eval = EarlyStopping(self.cfg), {}
        self.best_weights = BestWeights(self.backend, None if self.checkpointer is None else self.checkpointer.root)
        self._has_best_weights = False
        """Whether the model has the weights of the best evaluation, not the weights of the last
        step."""
        self.evaluated_step: int | None = None
        """The step of the last evaluation that `eval_at_start` or `eval_every_n_steps`
        requested."""
        self._publish_before_step = False
        """Whether the publisher lacks the weights of this step."""
        self._has_new_gradient = False
        """Whether a gradient other than 0 was applied since the last push."""
        self._is_offloaded = False
        """Whether weights and optimizer are in host memory."""
        self._checkpoint_s = 0.0
        self._time_left, self._rank_times, self._event_loop = TimeLeft(), RankTimes(), EventLoop()
        if resume_from is not None:
            self._resume(resume_from)
        decide_trees(self.backend, self.reference, self.cfg)

    def initialize_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer for the model on its device. A subclass can override this."""
        return build_optimizer(self.model, self.cfg)

    def _open_critic(self, model: nn.Module | None) -> Critic | None:
        if self.algo.critic is not None:
            from ludic.training.critic import Critic  # PPO alone needs it

            return Critic(self.algo.critic, model, self.model, self.cfg)
        if model is not None:
            raise ConfigError(f"{self.algo.name} has no critic, and critic= is given; use make_ppo, or leave it out")
        return None

    @property
    def model(self) -> nn.Module:
        """The model in this process. Raises ConfigError if the backend has it elsewhere."""
        return require_model(self._model)

    @model.setter
    def model(self, model: nn.Module) -> None:
        self._model = model

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of a `TorchBackend`; None with another backend."""
        return with_defaults(self.backend).optimizer

    async def train(
        self, num_steps: int | None = None, *, log_every: int = 1, log_fn: LogFn | None = None, eval_log_fn: LogFn | None = None
    ) -> None:
        """Take `num_steps` steps. None means until the source raises RequestsExhausted,
        StopRequested or StopAsyncIteration. `log_fn` gets the statistics of every `log_every`-th
        step, `eval_log_fn` the statistics of each evaluation. A run that was killed before it
        evaluated its last step evaluates it first. A run that early stopping ended takes no step
        unless the patience is raised, and one that a callback ended none unless its last step is to
        be later than before."""
        last = None if num_steps is None else self._step + num_steps
        self.schedule.begin(last)
        self._time_left.begin(self._step, last)
        if not self.early_stopping.stopped:
            self._undo_restore_best()
        if self.profiler is not None:
            self.profiler.check_range(self._step, last)
        async with self._settled(), self.callbacks.until_end(last):
            while not await self._is_over(eval_log_fn) and (last is None or self._step < last):
                try:
                    stats = await self.train_step()
                except (RequestsExhausted, StopRequested, StopAsyncIteration) as error:
                    if last is None:
                        await self.callbacks.end_if_requested(error)
                        return
                    raise
                if log_fn is not None and self._step % log_every == 0:
                    await await_if_needed(log_fn(stats))

    @asynccontextmanager
    async def _settled(self) -> AsyncIterator[None]:
        """Around all steps. Writes the trace of a run that ends before the profiler's range."""
        try:
            with settle_memory():
                yield
        finally:
            if self.profiler is not None:
                self.profiler.close()

    async def _is_over(self, log_fn: LogFn | None) -> bool:
        """Whether early stopping or a callback ends the run. A due evaluation comes first, also of
        the step at which the run was resumed."""
        if self.evaluator is not None and self.cfg.evaluates_at(self._step) and self.evaluated_step != self._step:
            if self._publish_before_step:
                await self.publish()  # the evaluator may sample from a server, which needs these weights
            await self._record_evaluation((await self.eval(log_fn=log_fn))["metrics"])
        if self.early_stopping.stopped:  # a run with more patience continues from the checkpoint of the last step
            await self.ensure_checkpoint()
            self.restore_best()
            return True
        if self.callbacks.stop is None:
            return False
        await self.ensure_checkpoint()
        return True

    async def _record_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Record the evaluation of the present step, in its checkpoint too, and keep the weights if
        they are the best so far. The weights before the first step are never kept. Callbacks see
        it, and may have a checkpoint saved."""
        step = self._step
        await self.callbacks.notify("on_evaluation", stats={eval_key(name): value for name, value in metrics.items()})
        if step > 0 and self.early_stopping.record_evaluation(metrics, step, self.cfg.model_device):
            self.best_weights.keep(step)
        self.evaluated_step = step
        if self.checkpointer is not None:
            self._sync_log()
            self.checkpointer.amend(step, {**self._evaluation_state(), **self.callbacks.state()})
        if self.callbacks.take_save_request():
            await self.ensure_checkpoint()

    def restore_best(self) -> int | None:
        """Set the weights to the best evaluation's, unpublished; `train` does so if early
        stopping ends it. Returns their step, or None. A later `train` resumes at `current_step`."""
        step = self.early_stopping.best_step
        if step is None:
            return None
        if not self.best_weights.restore(step):
            logger.warning("the best weights, of step %d, are missing; the weights of step %d stay", step, self._step)
            return None
        self._has_best_weights = True
        return step

    def _undo_restore_best(self) -> None:
        """Set the weights to the last step's, from its checkpoint, unless the model has them."""
        if not self._has_best_weights:
            return
        if self._has_checkpoint():
            self._resume(self._step)
        else:
            logger.warning("training goes on from the best weights: there is no checkpoint of step %d", self._step)
        self._has_best_weights = False

    def _check_early_stopping(self, metric: float) -> tuple[bool, bool]:  # documented, for subclasses
        return self.early_stopping.update(metric)

    @watchdog.watched("step")
    async def train_step(self) -> Stats:
        """Train on one macro-batch, in one or more optimizer steps. Returns its statistics, with
        prefixed keys."""
        with nullcontext() if self.profiler is None else self.profiler.step(self._step + 1):
            return await self._train_step()

    async def _train_step(self) -> Stats:
        # 1. Publish the weights, if the sampler lacks them: after a resume.
        timer = PhaseTimer()
        if self._checkpoint_s:
            timer.add("checkpoint", self._checkpoint_s)
            self._checkpoint_s = 0.0
        self.schedule.warn_once_if_guessed()
        if self._publish_before_step:
            await self.publish(timer)

        # 2. Fetch a macro-batch with samples to train on.
        batch, macro = await self._fetcher.fetch(self._step, timer)
        await self._take_device(timer)
        await self._check_sampler(macro)

        # 3. Score and weigh all its samples, before they are divided.
        speed = Speed(self)
        with timer.phase("forward_backward"):
            prepared = await self._prepare(macro, batch.meta[BATCH_NUMBER])
        macro = prepared.macro

        # 4. Take an optimizer step on each mini-batch.
        record = StepRecord(batch, macro, timer, prepared.stats)
        for epoch in range(self.cfg.epochs_per_batch if prepared.trains_policy else 0):
            for rows in macro.divide(self.cfg.minibatches_per_batch, seed=self.cfg.seed, step=self._step, epoch=epoch):
                with timer.phase("batching"):
                    mini_batch = self._make_mini_batch(macro, rows)
                if len(mini_batch):
                    await self._optimize(mini_batch, record, first_epoch=epoch == 0)
                record.add_padding(mini_batch)
        self._step += 1
        with_defaults(self.backend).note_step(self._step)

        # 5. Publish the new weights.
        if self.sync_every_steps and self._step % self.sync_every_steps == 0:
            await self.publish(timer)

        # 6. Log the step, then save: no step may be in a checkpoint and not in the log.
        stats = self._log_step(record, prepared, speed)
        await self.callbacks.notify("on_step", stats=stats, batch=batch)
        if self.checkpointer is not None and (self.callbacks.take_save_request() | self.checkpointer.should_save(self._step)):
            started = time.perf_counter()
            await self._save_with_pending(PENDING_PATIENCE_S)
            self._checkpoint_s = time.perf_counter() - started  # the log line of the next step has them
        return stats

    def _ingest(self, items: Sequence[SAWItem]) -> MacroBatch:
        """Truncate samples and drop those without actions. A subclass may keep some together."""
        merge_turns = self.cfg.merge_turns and adapted_loss(self.algo).reads_shared_only
        return MacroBatch.ingest(items, self.cfg.max_seq_len, merge_turns=merge_turns)

    async def _prepare(self, macro: MacroBatch, batch_number: int | None) -> Prepared:
        """Add what the loss reads of the whole macro-batch. A subclass may add more."""
        return await prepare(self, macro, batch_number)

    def _make_mini_batch(self, macro: MacroBatch, rows: Rows) -> MiniBatch:
        """The samples at `rows`, split into micro-batches, which are collated one by one."""
        gathers = bool(adapted_loss(self.algo).gathers)
        kind = TreeMiniBatch if with_defaults(self.backend).shares_prefixes else MiniBatch
        return kind(macro, rows, self.cfg, skip_zero_weight=skips_zero_weight(self), with_positions=gathers)

    async def _optimize(self, mini_batch: MiniBatch, record: StepRecord, *, first_epoch: bool) -> None:
        if not record.rate:  # a callback skipped the batch
            return
        at_start = first_epoch and (record.optimizer_steps == 0 or "proximal_logps" in mini_batch.batch.token_columns)
        with record.timer.phase("forward_backward"):
            result = await self.compute(lambda backend: backend.forward_backward(mini_batch, totals=mini_batch.totals))
        if self.callbacks.reads_gradient and not record.optimizer_steps:
            record.rate, record.rate_stats = await self.callbacks.scale_batch(combine_result(result, self.cfg.model_device))
            if not record.rate:
                await self.compute(lambda backend: with_defaults(backend).drop_gradient())
                record.add(result, None)
                return
        with record.timer.phase("optimizer"):
            factor = self.schedule.factor(self._step) * record.rate
            step = await self.compute(lambda backend: backend.optim_step(lr_factor=factor))
        self._has_new_gradient |= step["grad_norm"] > 0
        record.add(result, step, at_step_start=at_start)

    async def _check_sampler(self, macro: MacroBatch) -> None:
        """Run `preflight` once, on the first samples to train on; if one rank fails, all stop.
        Samples of older weights, which a checkpoint may hold, are not compared: the trainer does
        not have those weights. Without other samples on every rank nothing is compared."""
        check, self.preflight = self.preflight, None
        if check is None:
            return
        rescores = self.algo.rescores  # samples of another prompt than they are trained under are left out
        items = [item for item in macro.items if rescores is None or not rescores(item)]
        current = drop_stale(items, self._step, max_lag=0)
        lacks = float(bool(items) and not current)
        if ranks.max_over_ranks([lacks], self.cfg.model_device)[0]:
            logger.info("the first samples were drawn with older weights; the trainer is not compared with the sampler")
            return
        with preserved_rng():
            await check(self.backend, self.cfg, current)

    async def _take_device(self, timer: PhaseTimer) -> None:
        """Have the servers free the device, if they share it, and then move the weights there."""
        publisher = None if self.publisher is None else as_publisher(self.publisher)
        if publisher is not None and publisher.shares_device:
            with timer.phase("handover"), ranks.rank_0_alone("freeing the device"):
                if ranks.rank() == 0:
                    await await_if_needed(publisher.sleep())
        if self._is_offloaded:
            with timer.phase("handover"):
                await self.reload()

    async def offload(self) -> None:
        """Move weights, optimizer, critic and reference to host memory, from which they can be
        published and saved. `train` does so before it publishes, if `cfg.offload`."""
        if not self._is_offloaded:
            self._is_offloaded = True
            with ranks.agree("moving the weights to host memory"):
                for part in self._list_offloaded():
                    await part.offload().result()

    async def reload(self) -> None:
        """Move all that back to the device, before other code computes with it. `train` does so
        before it trains on a batch."""
        if self._is_offloaded:
            with ranks.agree("moving the weights to the device"):
                for part in self._list_offloaded():
                    await part.reload().result()
            self._is_offloaded = False

    def _list_offloaded(self) -> list[Any]:
        scorers: list[Any] = [self.reference, self.algo.teacher]
        for scorer in scorers:  # it grows: by `Teachers`, each with a prompt of its own or not, and what a cache is of
            inner = (getattr(scorer, "inner", None), getattr(scorer, "policy", None))
            scorers += [each for each in (*getattr(scorer, "by_name", {}).values(), *inner) if each is not None]
        backends = [with_defaults(self.backend), *([] if self.critic is None else [self.critic.backend])]
        return [*backends, *(scorer for scorer in scorers if hasattr(scorer, "reload"))]

    @watchdog.watched("publish")
    async def publish(self, timer: PhaseTimer | None = None) -> None:
        """Publish the weights as version `current_step`, on rank 0. A sharded model is gathered
        meanwhile, a part at a time; all ranks call this. A publisher without `needs_weights` is
        called on all ranks and gets none. With `cfg.offload` the device is left first."""
        if self.publisher is None:
            raise ConfigError("there is no PolicyPublisher to publish with; pass publisher= to Trainer")
        publisher, here = as_publisher(self.publisher), with_defaults(self.backend)
        has_changed, self._has_new_gradient = self._has_new_gradient, False

        async def push(publish: Callable[..., Any], weights: Any) -> None:
            publisher.expect_change(has_changed)
            call = partial(publish, weights, version=self._step)  # may be a coroutine function
            await await_if_needed(await asyncio.to_thread(call) if self.source.overlaps else call())

        timer = timer or PhaseTimer()
        if self.cfg.offload:
            with timer.phase("handover"):
                await self.offload()
        with timer.phase("publish"):
            takes_adapters = publisher.needs_weights and ranks.ask_rank_0("publishing", lambda: publisher.takes_adapters)
            chosen = adapters_alone if takes_adapters else self.param_filter
            if not publisher.needs_weights:
                await push(publisher.publish, {})
            elif here.is_sharded:
                stream = here.stream_weights(param_filter=chosen)
                with stream.shared():
                    if ranks.rank() == 0:
                        await push(publisher.publish_stream, stream)
            else:
                weights = await self.backend.export_weights(param_filter=chosen).result()
                with ranks.rank_0_alone(f"publishing the weights of step {self._step}"):
                    if ranks.rank() == 0:
                        await push(publisher.publish, weights)
        self._publish_before_step = False

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
        if self._has_best_weights and self._has_checkpoint():
            return self.checkpointer.find(step=self._step)  # which has the weights of the last step, to continue from
        self._sync_log()
        content = {**(metadata or {}), "algorithm": self.algo.name, **self._run_state()}
        return self.checkpointer.save_backend(
            self.backend, step=self._step, metadata=content, critic=self._critic_backend, **self.control.files(self._step)
        )

    @property
    def _critic_backend(self) -> TorchBackend | None:
        return None if self.critic is None else self.critic.backend

    @watchdog.watched("load")
    def _resume(self, resume_from: int | str | Path) -> None:
        assert self.checkpointer is not None
        locate = self.checkpointer.locate
        folder = ranks.ask_rank_0(f"finding the checkpoint {resume_from}", lambda: str(locate(resume_from)))
        with ranks.agree(f"loading the checkpoint {folder}"):
            metadata = self.checkpointer.load_backend(self.backend, Path(folder), critic=self._critic_backend)
            self._step = int(metadata["step"])
            self._restore_run(metadata)
        self._publish_before_step = bool(self.sync_every_steps)

    def _run_state(self) -> dict[str, Any]:
        """The entries of a checkpoint other than weights and optimizer, so that a resumed run
        continues as if it had not ended. All ranks call it."""
        state = {
            "scheduler_state_dict": self.schedule.state_dict(self._step),
            **self._evaluation_state(),
            "rng_state": rng_state(),
            **self.callbacks.state(),
        }
        if self.control.controllers:
            state["controllers"] = self.control.state_dict()
        if self.token_log is not None:
            state["token_log"] = self.token_log.state_dict()
        source_state = self.source.state_dict()
        if source_state is not None:
            state[SOURCE] = source_state
        add_ranks(state, self.source)
        return state

    def _evaluation_state(self) -> dict[str, Any]:
        return {
            "early_stopping": self.early_stopping.state_dict(),
            "last_eval": self.last_eval,
            "evaluated_step": self.evaluated_step,
        }

    def _restore_run(self, metadata: Mapping[str, Any]) -> None:
        """Restore `_run_state`. What a checkpoint of an older version lacks stays as it is."""
        if "scheduler_state_dict" in metadata:
            self.schedule.resume(int(metadata["scheduler_state_dict"]["total_steps"]))
        if "early_stopping" in metadata:
            self.early_stopping.load_state_dict(metadata["early_stopping"])
        self.last_eval = dict(metadata.get("last_eval", {}))
        self.evaluated_step = metadata.get("evaluated_step")
        self.control.load_state_dict(metadata.get("controllers", {}))
        self.callbacks.load_state(metadata)
        if self.token_log is not None and "token_log" in metadata and ranks.rank() == 0:
            self.token_log.load_state_dict(metadata["token_log"])
        restore_of_this_rank(self.source, metadata)

    def _log_step(self, record: StepRecord, prepared: Prepared, speed: Speed) -> Stats:
        """Log the step that was just taken if it is due; returns what was logged, or only its
        number. Controllers see every step. All ranks call it."""
        step, device = self._step, self.cfg.model_device
        is_logged, is_controlled = step % self.cfg.log_every == 0, bool(self.control.controllers)
        if not is_logged and not is_controlled:
            return {"train/step": float(step)}
        stats = record.stats(self.reducers, self.cfg, of_all_ranks=is_controlled)
        if is_controlled:
            stats |= self.control.update(stats, prepared, self.schedule, device, step=step - 1)
        if not is_logged:
            return {"train/step": float(step)}
        times = self._rank_times.compare(record.timer.seconds("forward_backward"), device)
        tokens = stats["perf/real_tokens"] + stats["perf/shared_tokens"]
        times |= speed.stats(
            training_s=sum(map(record.timer.seconds, TRAINING_PHASES)),
            tokens=tokens if record.macro.share is None else tokens / ranks.world_size(),
            step_s=stats["perf/step_s"],
        )
        left = self._time_left.after(step)
        times |= {} if left is None else {"perf/time_left_s": left}
        grouped = prefix_keys({"train_step": float(step), **stats, **times})
        self._log_safely(grouped)
        return grouped

    def _log_safely(self, stats: Stats) -> None:
        """Log on rank 0. If the logger fails, the run goes on."""
        if self.train_logger is None or ranks.rank() != 0:
            return
        try:
            self.train_logger.log(self._step, stats)
        except Exception:
            logger.exception("the logger failed at step %d; training goes on", self._step)

    def _sync_log(self) -> None:
        """Write what was logged to disk. Called before a checkpoint is written, so that no step is
        in a checkpoint and not in the log."""
        if ranks.rank() == 0:
            try:
                sync_log(self.train_logger)
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
        """Evaluate and return `records` and `metrics`. This runs on rank 0, and both are empty
        on the others, unless the evaluator has `on_all_ranks`. For an argument that is None here
        and in the config, the evaluator uses its default. Random generators keep their state."""
        if self.evaluator is None:
            raise ConfigError("the trainer has no evaluator; pass evaluator=")
        limits = self.cfg.eval_limits(max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency)
        records: list[Any] = []
        metrics: Stats = {}
        together = runs_on_all_ranks(self.evaluator)
        doing = f"the evaluation of step {self._step}"
        with watchdog.phase("evaluation"), ranks.agree(doing) if together else ranks.rank_0_alone(doing):
            if ranks.rank() == 0 or together:
                with preserved_rng():
                    records, metrics = await self.evaluator.eval(reducers=reducers, **limits)
                self.last_eval = {eval_key(name): value for name, value in metrics.items()} | {"eval/step": float(self._step)}
                self._log_safely(self.last_eval)
                if log_fn is not None and ranks.rank() == 0:
                    await await_if_needed(log_fn(self.last_eval))
        return {"records": records, "metrics": metrics}

    def train_sync(
        self, num_steps: int | None = None, *, log_every: int = 1, log_fn: LogFn | None = None, eval_log_fn: LogFn | None = None
    ) -> None:
        """`train` from code that is not a coroutine."""
        training = self.train(num_steps, log_every=log_every, log_fn=log_fn, eval_log_fn=eval_log_fn)
        self._event_loop.run(training, instead="trainer.train(...)")

    def train_step_sync(self) -> Stats:
        """`train_step` from code that is not a coroutine."""
        return self._event_loop.run(self.train_step(), instead="trainer.train_step()")

    def reload_sync(self) -> None:
        """`reload` from code that is not a coroutine."""
        self._event_loop.run(self.reload(), instead="trainer.reload()")

    def eval_sync(self, **options: Any) -> dict[str, Any]:
        """`eval` from code that is not a coroutine."""
        return self._event_loop.run(self.eval(**options), instead="trainer.eval(...)")
