"""Calls the callbacks of a run, keeps their state, and ends the run when one of them asks."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ludic.errors import ConfigError, StopRequested
from ludic.event_loop import await_if_needed
from ludic.training import ranks
from ludic.training.batching.source import STOP_PATIENCE_S
from ludic.training.callbacks.protocol import Callback, TrainingEvent
from ludic.training.checkpoint import CheckpointManager
from ludic.training.evaluators.protocol import bare_name, eval_key
from ludic.training.loop.state import TrainerState
from ludic.training.rng import await_preserving_rng
from ludic.training.types import SAWBatch

logger = logging.getLogger(__name__)

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
    either. `begin` with a later last step than the stopped run was to have goes on.

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
        at_rank_0 = ranks.ask_rank_0("listing the callbacks", lambda: _list_names(self.callbacks))
        with ranks.agree("comparing the callbacks of the ranks"):
            _check(self.callbacks, run.checkpointer)
            check_watched(self.callbacks, run.cfg.eval_every_n_steps if run.evaluator is not None else None)
            _check_same(self.callbacks, at_rank_0)
        self.stop: Stop | None = None
        """Why the run ended before its last step; None if no callback ended it."""
        self.saves = False
        """Whether a checkpoint of this step was requested."""
        self._last: int | None = None
        self._states: dict[str, Any] = {}
        self._has_ended = False
        """Whether `on_end` was called for this `train`."""
        self._protect_checkpoints()

    def begin(self, last: int | None) -> None:
        """Called before the first step. `last`: number of the last step. None means until the data
        ends."""
        self._last, self._has_ended = last, False
        stop = self.stop
        if stop is not None and last is not None and stop.of_steps is not None and last > stop.of_steps:
            self.stop = None

    def forget_stop(self) -> None:
        """Let the run go on that a callback ended."""
        self.stop = None

    @asynccontextmanager
    async def until_end(self, last: int | None) -> AsyncIterator[None]:
        """`begin`, and after the block a checkpoint of the last step and `on_end` of the callbacks;
        `on_end` also if the block raises an error."""
        self.begin(last)
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
        await self._end(self._why_ended())

    async def end_if_requested(self, error: BaseException) -> None:
        """After StopRequested, which all ranks raise: `on_end`, once a checkpoint is saved. Nothing
        may come before that, because the process may be killed soon."""
        if isinstance(error, StopRequested) and self.callbacks:
            try:
                await self._save(patience_s=STOP_PATIENCE_S)
            finally:
                await self._end(_describe(error), is_interrupted=True)

    def _why_ended(self) -> str:
        step, last = self._run.current_step, self._last
        if self.stop is not None:
            return self.stop.reason
        if self._run.early_stopping.stopped:
            return f"{self._run.early_stopping.cfg.early_stopping_metric} did not improve"
        return (
            f"step {step} was the last one"
            if last is not None and step >= last
            else f"there were no more batches after step {step}"
        )

    async def _end(self, reason: str, *, is_interrupted: bool = False) -> None:
        """`on_end`, on rank 0 alone: after an error the other ranks may be anywhere."""
        if self._has_ended:
            return
        self._has_ended = True
        if self.callbacks and ranks.rank() == 0:
            facts = {"reason": reason, "is_interrupted": is_interrupted}
            await self._call("on_end", lambda callback: callback.on_end(self._event(callback, None, **facts)))
            self._protect_checkpoints()  # a save may follow

    async def on_step(self, stats: Mapping[str, float], batch: SAWBatch) -> None:
        await self._notify("on_step", stats=stats, batch=batch)

    async def on_evaluation(self, metrics: Mapping[str, float]) -> None:
        """`metrics`: as the evaluator named them, from rank 0, which may be the only rank that has
        them."""
        await self._notify("on_evaluation", stats={eval_key(name): value for name, value in metrics.items()})

    async def on_checkpoint(self, folder: Path | None) -> None:
        """Called on all ranks after a checkpoint was saved, which then gets the states that this
        changed. `folder` is rank 0's."""
        before = self.state()
        asked = self.saves
        await self._notify("on_checkpoint", checkpoint=folder)
        self.saves = asked  # it has just been saved
        changed = bool(self.callbacks) and ranks.ask_rank_0("comparing the states of callbacks", lambda: self.state() != before)
        if changed and self._run.checkpointer is not None:
            self._run.checkpointer.amend(self._run.current_step, self.state())

    async def _notify(self, method: str, **facts: Any) -> None:
        if not self.callbacks:
            return
        doing = f"{method} of the callbacks at step {self._run.current_step}"
        with ranks.rank_0_alone(doing) as shared:
            if ranks.rank() == 0:
                asked: list[dict[str, Any]] = []
                await self._call(method, lambda callback: getattr(callback, method)(self._event(callback, asked, **facts)))
                shared.extend(asked)
        self._protect_checkpoints()
        for wish in shared:
            if "stop" not in wish:
                self.saves = True
            elif self.stop is None:
                self.stop = Stop(**wish["stop"])
                logger.info("%s ends the run at step %d: %s", self.stop.callback, self.stop.step, self.stop.reason)

    async def _call(self, method: str, call: Callable[[Callback], Any]) -> None:
        async def call_one(callback: Callback) -> None:
            await await_if_needed(call(callback))

        for callback in self.callbacks:
            try:
                await await_preserving_rng(call_one(callback))
            except Exception:
                step = self._run.current_step
                logger.exception("the callback %s failed in %s at step %d; training goes on", callback.name, method, step)

    def _event(self, callback: Callback, asked: list[dict[str, Any]] | None, **facts: Any) -> TrainingEvent:
        """`asked` gets the requests of the callback. None means that it is too late for one."""
        run = self._run

        def stop(reason: str) -> None:
            if asked is None:
                raise ConfigError("the run has ended and cannot be stopped; call event.stop in another method than on_end")
            asked.append({"stop": asdict(Stop(callback.name, str(reason), run.current_step, self._last))})

        def save_checkpoint() -> None:
            if asked is None:
                raise ConfigError("the run has ended and saves nothing; call event.save_checkpoint in another method than on_end")
            if run.checkpointer is None:
                raise ConfigError("the trainer has no checkpointer; pass checkpointer= or checkpoint_config=")
            asked.append({"save": True})

        return TrainingEvent(run.current_step, run, stop, save_checkpoint, **{"stats": {}, **facts})

    def take_save_request(self) -> bool:
        """Whether a checkpoint of this step was requested. The next call returns False."""
        asked, self.saves = self.saves, False
        return asked

    async def end_if_stopped(self) -> bool:
        """Whether a callback ends the run. If so, save a checkpoint of the last step."""
        if self.stop is None:
            return False
        await self._save()
        return True

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


def _list_names(callbacks: Sequence[Callback]) -> list[str]:
    """Raises ConfigError for an object that is no callback, and for an `on_` method that is never
    called."""
    called = [name for name in dir(Callback) if name.startswith("on_")]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(f"{callback!r} is not a ludic.training.Callback; pass an object of a class derived from it")
        unknown = [name for name in dir(callback) if name.startswith("on_") and name not in called]
        if unknown:
            raise ConfigError(f"{type(callback).__name__}.{unknown[0]} is never called; a callback has {', '.join(called)}")
    return [callback.name for callback in callbacks]


def _check_same(callbacks: Sequence[Callback], at_rank_0: Sequence[str]) -> None:
    names = _list_names(callbacks)
    if names != list(at_rank_0):
        raise ConfigError(
            f"rank {ranks.rank()} has the callbacks {names}, and rank 0 {list(at_rank_0)}; pass the same callbacks on all"
            " ranks: rank 0 alone calls them"
        )


def _check(callbacks: Sequence[Callback], checkpointer: CheckpointManager | None) -> None:
    names = _list_names(callbacks)
    for callback in callbacks:
        if names.count(callback.name) > 1:
            raise ConfigError(
                f"two callbacks have the name {callback.name!r}, under which a checkpoint has their state; leave one out"
            )
        if callback.needs_checkpoints and checkpointer is None:
            raise ConfigError(f"the callback {callback.name!r} needs checkpoints; pass checkpointer= or checkpoint_config=")
        if callback.needs_full_checkpoints and checkpointer is not None and checkpointer.cfg.layout == "shallow":
            raise ConfigError(f"the callback {callback.name!r} needs whole models, not layout=shallow; set layout=full")


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
                f"the callback {callback.name!r} reads {metric} of evaluations, and there are none; set eval_every_n_steps (in a recipe "
                "trainer.eval_every_n_steps), and pass an evaluator to a Trainer"
            )
        if measured is not None and bare_name(metric) not in measured:
            raise ConfigError(
                f"the callback {callback.name!r} reads {metric}, which this run does not measure; it measures {', '.join(measured)}"
            )
