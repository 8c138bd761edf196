"""Callbacks: what they get, what they may ask of the run, and how the run calls them, keeps their
state, and ends when one of them asks."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ludic.errors import ConfigError, StopRequested
from ludic.event_loop import await_if_needed
from ludic.training import ranks
from ludic.training.batching.source import STOP_PATIENCE_S
from ludic.training.checkpoint import CheckpointManager
from ludic.training.evaluators.protocol import bare_name
from ludic.training.loop.state import TrainerState
from ludic.training.rng import await_preserving_rng
from ludic.training.types import SAWBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class TrainingEvent:
    """A step, an evaluation, a checkpoint, or the end of `Trainer.train`."""

    step: int
    """Number of steps taken."""
    trainer: TrainerState
    """The trainer. Do not train, publish or save with it here: the other ranks do not."""
    stop: Callable[[str], None]
    """Ends the run after this step, for the reason given: a sentence. A checkpoint is saved. The
    first callback that asks decides. Raises ConfigError at the end."""
    save_checkpoint: Callable[[], None]
    """Has a checkpoint of this step saved after all callbacks were called. Raises ConfigError
    without a checkpointer, and at the end."""
    scale_batch: Callable[[float, Mapping[str, float]], None]
    """In `on_gradient`, multiplies the learning rate of this batch by the factor, and adds the
    statistics to the record of the step. 0 skips the batch: neither weights nor optimizer
    change."""
    stats: Mapping[str, float]
    """Of a step, what was logged of it, with prefixed keys such as `train/loss`; only `train/step`
    if it is not logged (`log_every`). Of a gradient, the same keys of the loss and `mismatch/`. Of
    an evaluation, its metrics: `eval/loss`. Else empty."""
    batch: SAWBatch | None = None
    """Of a step, the batch of this rank."""
    checkpoint: Path | None = None
    """Of a checkpoint, its folder."""
    reason: str = ""
    """Of the end, why: a sentence."""
    is_interrupted: bool = False
    """Of the end, whether an error or a request to stop, such as Ctrl-C, is its cause. The process
    may be killed soon: wait for nothing."""


class Callback:
    """Base class. A subclass overrides what it needs; each method may be a coroutine function.

    With several ranks, rank 0 alone calls it, and what it asks for holds for all of them. A
    callback that raises is logged with its traceback, and the run goes on. Random generators keep
    their state, so that a callback does not change the samples; tasks that it starts may.

    >>> class Alarm(Callback):
    ...     def on_step(self, event):
    ...         if event.stats.get("train/kl_actor_policy", 0.0) > 0.5:
    ...             event.stop("the policy is far from the sampler")
    """

    needs_checkpoints = False
    """Whether a trainer without a checkpointer is refused."""
    needs_full_checkpoints = False
    """Whether one whose checkpoints have the layout `shallow` is refused too."""

    @property
    def watched_metric(self) -> str | None:
        """The metric of evaluations without which it does nothing, so that a run without it is
        refused. None if it needs none."""
        return None

    @property
    def name(self) -> str:
        """Under which a checkpoint has its state. Two callbacks of a trainer have two names."""
        return type(self).__name__

    @property
    def kept_steps(self) -> Collection[int]:
        """Steps whose checkpoints must not be deleted. They do not count as `max_to_keep`."""
        return ()

    def on_gradient(self, event: TrainingEvent) -> Any:
        """Called before the first optimizer step of each batch, once its gradient is known. A
        callback with this method waits for the device there."""

    def on_step(self, event: TrainingEvent) -> Any:
        """Called after each training step, before its checkpoint."""

    def on_evaluation(self, event: TrainingEvent) -> Any:
        """Called after each evaluation of the training loop."""

    def on_checkpoint(self, event: TrainingEvent) -> Any:
        """Called after each checkpoint that the training loop saved."""

    def on_end(self, event: TrainingEvent) -> Any:
        """Called when `Trainer.train` returns or fails. If there is a checkpointer, a checkpoint of
        the last step is saved before, unless an error ended the run."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next calls depend on, as JSON. It is saved in checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""


KEY = "callbacks"
"""Under which a checkpoint has the states."""


@dataclass(frozen=True)
class Stop:
    """Why a callback ended a run."""

    callback: str
    """Its name."""
    reason: str
    step: int
    """Number of steps taken."""
    of_steps: int | None
    """Number of steps that the run was to take. None means until its data ends."""


class Callbacks:
    """The callbacks of a run. Rank 0 calls them, and all ranks get what they ask for; without
    callbacks nothing is done.

    A stop is part of the checkpoint: a run that is killed at its end and resumed takes no step
    either. A `train` with a later last step than the stopped run was to have goes on.

    >>> # stopped at step 30 of train(100), and resumed there
    >>> await trainer.train(100 - trainer.current_step)  # until step 100: takes no step
    >>> await trainer.train(100)  # until step 130: goes on
    """

    def __init__(self, callbacks: Sequence[Callback], run: TrainerState, save: Callable[..., Awaitable[None]]) -> None:
        """`save`: `Trainer.ensure_checkpoint`. Raises ConfigError for an object that is no
        callback, two of one name, one that needs checkpoints if there are none, and ranks with
        different ones."""
        self.callbacks = tuple(callbacks)
        self._run, self._save = run, save
        with ranks.agree("checking the callbacks"):
            names = _check(self.callbacks, run.checkpointer)
            check_watched(self.callbacks, run.cfg.eval_every_n_steps if run.evaluator is not None else None)
        at_rank_0 = ranks.ask_rank_0("listing the callbacks", lambda: names)
        with ranks.agree("comparing the callbacks of the ranks"):
            if names != at_rank_0:
                raise ConfigError(f"rank {ranks.rank()} has the callbacks {names}, and rank 0 {at_rank_0}; use the same on all")
        self.stop: Stop | None = None
        """Why the run ended before its last step; None if no callback ended it."""
        self.saves = False
        """Whether a checkpoint of this step was requested."""
        self.reads_gradient = any(type(each).on_gradient is not Callback.on_gradient for each in self.callbacks)
        """Whether a callback has `on_gradient`."""
        self._scale, self._scale_stats = 1.0, dict[str, float]()
        self._last: int | None = None
        self._states: dict[str, Any] = {}
        self._has_ended = False
        """Whether `on_end` was called for this `train`."""
        self._protect_checkpoints()

    def forget_stop(self) -> None:
        """Let the run go on that a callback ended."""
        self.stop = None

    @asynccontextmanager
    async def until_end(self, last: int | None) -> AsyncIterator[None]:
        """After the block, which takes the steps, a checkpoint of the last step and `on_end` of the
        callbacks; `on_end` also if the block raises an error. `last`: number of the last step. None
        means until the data ends."""
        self._last, self._has_ended = last, False
        if self.stop is not None and last is not None and self.stop.of_steps is not None and last > self.stop.of_steps:
            self.stop = None
        try:
            yield
            if self.callbacks:
                await self._save()
        except StopRequested as error:
            await self.end_if_requested(error)
            raise
        except Exception as error:
            await self._end(_describe(error), is_interrupted=True)
            raise
        step, stopping = self._run.current_step, self._run.early_stopping
        if self.stop is not None:
            reason = self.stop.reason
        elif stopping.stopped:
            reason = f"{stopping.cfg.early_stopping_metric} did not improve"
        elif last is not None and step >= last:
            reason = f"step {step} was the last one"
        else:
            reason = f"there were no more batches after step {step}"
        await self._end(reason)

    async def end_if_requested(self, error: BaseException) -> None:
        """After StopRequested, which all ranks raise: `on_end`, once a checkpoint is saved. Nothing
        may come before that, because the process may be killed soon."""
        if isinstance(error, StopRequested) and self.callbacks:
            try:
                await self._save(patience_s=STOP_PATIENCE_S)
            finally:
                await self._end(_describe(error), is_interrupted=True)

    async def _end(self, reason: str, *, is_interrupted: bool = False) -> None:
        """`on_end`, on rank 0 alone: after an error the other ranks may be anywhere."""
        if self._has_ended:
            return
        self._has_ended = True
        if self.callbacks and ranks.rank() == 0:
            await self._call("on_end", None, reason=reason, is_interrupted=is_interrupted)
            self._protect_checkpoints()  # a save may follow

    async def on_checkpoint(self, folder: Path | None) -> None:
        """Called on all ranks after a checkpoint was saved, which then gets the states that this
        changed. `folder` is rank 0's."""
        before = self.state()
        asked = self.saves
        await self.notify("on_checkpoint", checkpoint=folder)
        self.saves = asked  # it has just been saved
        changed = bool(self.callbacks) and ranks.ask_rank_0("comparing the states of callbacks", lambda: self.state() != before)
        if changed and self._run.checkpointer is not None:
            self._run.checkpointer.amend(self._run.current_step, self.state())

    async def scale_batch(self, stats: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """`on_gradient`. Returns the factor of the learning rate, and statistics."""
        self._scale, self._scale_stats = 1.0, {}
        await self.notify("on_gradient", stats=stats)
        return self._scale, self._scale_stats

    async def notify(self, method: str, **facts: Any) -> None:
        """Call `method` of all callbacks, with these facts of its event, on rank 0, which may be
        the only rank that has them. What they ask for holds on all ranks, which call this."""
        if not self.callbacks:
            return
        with ranks.rank_0_alone(f"{method} of the callbacks at step {self._run.current_step}") as shared:
            if ranks.rank() == 0:
                asked: list[dict[str, Any]] = []
                await self._call(method, asked, **facts)
                shared.extend(asked)
        self._protect_checkpoints()
        for wish in shared:
            if "scale" in wish:
                self._scale *= wish["scale"]
                self._scale_stats |= wish["stats"]
            elif "stop" not in wish:
                self.saves = True
            elif self.stop is None:
                self.stop = Stop(**wish["stop"])
                logger.info("%s ends the run at step %d: %s", self.stop.callback, self.stop.step, self.stop.reason)

    async def _call(self, method: str, asked: list[dict[str, Any]] | None, **facts: Any) -> None:
        async def call_one(callback: Callback) -> None:
            await await_if_needed(getattr(callback, method)(self._event(callback, asked, **facts)))

        for callback in self.callbacks:
            try:
                await await_preserving_rng(call_one(callback))
            except Exception:
                step = self._run.current_step
                logger.exception("the callback %s failed in %s at step %d; training goes on", callback.name, method, step)

    def _event(self, callback: Callback, asked: list[dict[str, Any]] | None, **facts: Any) -> TrainingEvent:
        """`asked` gets the requests of the callback. None means that it is too late for one."""
        run = self._run

        def ask(request: dict[str, Any]) -> None:
            if asked is None:
                raise ConfigError("the run has ended; call event.stop and event.save_checkpoint in another method than on_end")
            asked.append(request)

        def stop(reason: str) -> None:
            ask({"stop": asdict(Stop(callback.name, str(reason), run.current_step, self._last))})

        def scale_batch(factor: float, stats: Mapping[str, float]) -> None:
            ask({"scale": float(factor), "stats": dict(stats)})

        def save_checkpoint() -> None:
            if run.checkpointer is None:
                raise ConfigError("the trainer has no checkpointer; pass checkpointer= or checkpoint_config=")
            ask({"save": True})

        return TrainingEvent(run.current_step, run, stop, save_checkpoint, scale_batch, **{"stats": {}, **facts})

    def take_save_request(self) -> bool:
        """Whether a checkpoint of this step was requested. The next call returns False."""
        asked, self.saves = self.saves, False
        return asked

    def _protect_checkpoints(self) -> None:
        """Have the checkpoints kept that callbacks need. One that fails to say keeps none."""
        kept: set[int] = set()
        for callback in self.callbacks:
            try:
                kept |= set(callback.kept_steps)
            except Exception:
                logger.exception("the callback %s failed to say which checkpoints it keeps", callback.name)
        if self.callbacks and self._run.checkpointer is not None:
            self._run.checkpointer.protected = frozenset(kept)

    def state(self) -> dict[str, Any]:
        """What a checkpoint has of the callbacks; empty without any. One whose state is not JSON
        keeps its last one."""
        if not self.callbacks:
            return {}
        for callback in self.callbacks:
            try:
                state = callback.state_dict()
                self._states[callback.name] = json.loads(json.dumps(state))
            except Exception:
                logger.exception("the state of the callback %s cannot be saved; the one before is kept", callback.name)
        return {KEY: {"states": dict(self._states), "stop": None if self.stop is None else asdict(self.stop)}}

    def load_state(self, metadata: Mapping[str, Any]) -> None:
        """Continue from `state`, which may have other keys too. A callback that the checkpoint
        lacks begins anew, and so does one that cannot read its state, with a warning."""
        saved = metadata.get(KEY, {})
        self.stop = Stop(**saved["stop"]) if saved.get("stop") and self.callbacks else None
        self._states = dict(saved.get("states", {}))
        for callback in self.callbacks:
            if callback.name not in self._states:
                continue
            try:
                callback.load_state_dict(self._states[callback.name])
            except Exception:
                logger.exception("the callback %s cannot read its state in the checkpoint, and begins anew", callback.name)
        self._protect_checkpoints()


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _check(callbacks: Sequence[Callback], checkpointer: CheckpointManager | None) -> list[str]:
    """The names. Raises ConfigError for an object that is no callback, for an `on_` method that is
    never called, for two of one name, and for one that needs other checkpoints than there are."""
    called = [name for name in dir(Callback) if name.startswith("on_")]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(f"{callback!r} is not a ludic.training.Callback; pass an object of a class derived from it")
        unknown = [name for name in dir(callback) if name.startswith("on_") and name not in called]
        if unknown:
            raise ConfigError(f"{type(callback).__name__}.{unknown[0]} is never called; a callback has {', '.join(called)}")
    names = [callback.name for callback in callbacks]
    for callback in callbacks:
        if names.count(callback.name) > 1:
            raise ConfigError(f"two callbacks have the name {callback.name!r}; leave one out")
        if callback.needs_checkpoints and checkpointer is None:
            raise ConfigError(f"the callback {callback.name!r} needs checkpoints; pass checkpointer= or checkpoint_config=")
        if callback.needs_full_checkpoints and checkpointer is not None and checkpointer.cfg.layout == "shallow":
            raise ConfigError(f"the callback {callback.name!r} needs whole models, not layout=shallow; set layout=full")
    return names


def check_watched(callbacks: Sequence[Callback], every: int | None, *, measured: Sequence[str] | None = None) -> None:
    """Raise ConfigError for a callback whose metric no evaluation will give: there are none or, if
    it is known what they measure, they measure others. `every`: steps between evaluations. None
    means that there are none."""
    for callback in callbacks:
        metric = callback.watched_metric
        if metric is None:
            continue
        if not every:
            raise ConfigError(
                f"the callback {callback.name!r} reads {metric}; set trainer.eval_every_n_steps, and pass an evaluator to a Trainer"
            )
        if measured is not None and bare_name(metric) not in measured:
            raise ConfigError(f"the callback {callback.name!r} reads {metric}, and this run measures {', '.join(measured)}")
