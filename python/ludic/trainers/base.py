"""Errors in what the user wrote: without the library's own frames, and with our names for TRL's."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import wraps
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

from ludic.agents.tool_agent import given_tools
from ludic.errors import INPUT_ERRORS, CheckpointError, ConfigError, ConfigTypeError
from ludic.event_loop import call_outside_loop
from ludic.interaction.agent_program import given_agents
from ludic.launch.rank_environment import read_rank_environment
from ludic.recipes.actors import uses_queue
from ludic.recipes.foreign_names import ARGUMENTS
from ludic.recipes.named_sources import GIVEN_TASKS
from ludic.recipes.overrides import Override
from ludic.recipes.processes import needs_launcher
from ludic.recipes.schema import Recipe
from ludic.runs.command import RunCommand
from ludic.runs.directory import RunDirectory, run_path
from ludic.trainers.inputs import overrides_of
from ludic.training.reward_functions import given_rewards

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)
_SETTINGS_TOO = ("tokenizer", "reward_model")
"""Arguments of TRL that are settings here, whose values are paths and no objects."""


def with_short_errors(call: Callable[P, T]) -> Callable[P, T]:
    """`call`, whose traceback for wrong input ends at the user's line: the message names the fault.
    The logger `ludic.trainers.base` has the whole one, at the level DEBUG. Any other error keeps
    its own."""

    @wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except (*INPUT_ERRORS, CheckpointError) as error:
            logger.debug("where it was raised", exc_info=True)
            raise error.with_traceback(None) from None

    return wrapped


def without_trl_names(call: Callable[P, T]) -> Callable[P, T]:
    """`call`, which refuses arguments that are TRL's and not its own with a ConfigTypeError that
    names ours for each."""
    own = signature(call).parameters

    @wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        wrong = [name for name in kwargs if name in ARGUMENTS and name not in own]
        settings = {name for name in _SETTINGS_TOO if isinstance(kwargs.get(name), str | PathLike | None)}
        if wrong := [name for name in wrong if name not in settings]:
            raise ConfigTypeError("; ".join(f"{name} is an argument of TRL; write {ARGUMENTS[name]}" for name in wrong))
        return call(*args, **kwargs)

    return wrapped


if TYPE_CHECKING:
    from ludic.runs.base import TrainingRun
    from ludic.training.callbacks import Callback
    from ludic.training.trainer import Trainer


_GIVEN = {"reward": given_rewards, "tool": given_tools, "task": GIVEN_TASKS.given, "agent": given_agents}
"""Kind of the user's objects -> gives them their names."""


class RecipeTrainer:
    """Runs a recipe as its command does: the same settings and checks, the same folder, the same
    resume.

    `recipe` has every setting. From the beginning of `train` on, `run` has the phases, with
    `run.parts` (data, algorithm, model, tokenizer), and `trainer` is the `Trainer` of the present
    phase.
    """

    kind: ClassVar[type[RunDirectory]] = RunDirectory
    """The class of the run's folder, which names its command and the class of the run."""

    def __init__(
        self,
        overrides: Sequence[Override],
        callbacks: Sequence[Callback],
        own: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """`own`: what the settings name, and only this object knows, by kind: `reward`, `tool`,
        `task` and `agent`. Raises ConfigError for settings that cannot be."""
        self.callbacks = tuple(callbacks)
        """Called in addition to the callbacks of the settings. Each `train` begins with their state
        of the first one's beginning."""
        self.recipe: Any = self.kind.compose(overrides)  # type: ignore[arg-type]
        self.run: TrainingRun[Any, Any, Any] | None = None
        """The run; None before `train`."""
        self._own = {kind: dict(objects) for kind, objects in (own or {}).items()}
        self._states: list[dict[str, Any] | None] | None = None
        self._is_stopped = False
        """Whether the present `train` was asked to end."""
        self._is_set_up = False
        """Whether `run` belongs to the present `train`."""
        self._check_place()

    @property
    def folder(self) -> Path:
        """The folder of the run. Raises ConfigError before there is one."""
        return self._require_run().directory.path

    @property
    def trainer(self) -> Trainer:
        """The `Trainer` of the present or last phase. Raises ConfigError before there is one."""
        trainer = self._require_run().trainer
        if trainer is None:
            raise ConfigError("no phase has begun to train yet; call train()")
        return trainer

    @property
    def model(self) -> Any:
        """The model that is trained. Raises ConfigError before `train`."""
        return self._require_run().parts.model

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer. Raises ConfigError before `train`."""
        return self._require_run().parts.tokenizer

    @with_short_errors
    def train(self, *, resume: bool | str | Path = False) -> dict[str, Any]:
        """Run to the end, and return the content of summary.json. After Ctrl-C it has `status`
        interrupted.

        `resume`: True to go on with the run of this name (`name=`), if there is one; a path to go
        on with the run in that folder. Settings that differ from those that it began with are
        errors, but for more `steps` and for those that change no result. In a notebook this blocks
        too; the run is then in another thread, and a second interrupt returns immediately, while
        that thread still ends the run.
        """
        self._check_place()
        place, arguments = self._find_resumed(resume), list[str]()
        if place is not None:  # its steps may be raised
            began, steps = self.kind.open_to_read(place).read_progress().recipe or {}, self.recipe.steps
            arguments = [] if steps is None or steps == began.get("steps", steps) else [f"steps={steps}"]
        self._reset_callbacks()
        self._is_stopped = self._is_set_up = False
        command = RunCommand(self.kind, arguments, resume=place, recipe=self.recipe, on_set_up=self._begin)
        with ExitStack() as names:
            for kind, objects in self._own.items():
                names.enter_context(_GIVEN[kind](objects))
            call_outside_loop(command.execute, on_interrupt=self.stop)
        if self.run is None:
            return {}
        summary = self.run.directory.summary
        return json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {}

    def stop(self) -> None:
        """Have `train`, which is running in another thread, end after this step, as Ctrl-C does;
        while the model is loaded, before the first step."""
        self._is_stopped = True
        self._apply_stop()

    def _apply_stop(self) -> None:
        if self._is_stopped and self._is_set_up and self.run is not None and not self.run.stop:
            self.run.stop.signum = signal.SIGINT

    def _begin(self, run: TrainingRun[Any, Any, Any]) -> None:
        """Called with the run of the present `train` when it is set up."""
        from ludic.training.callbacks.base import check_watched

        check_watched(self.callbacks, run.recipe.trainer.eval_every_n_steps, measured=run.measured)
        run.callbacks = self.callbacks
        self.run, self._is_set_up = run, True
        self._apply_stop()

    def _check_place(self) -> None:
        """Raise ConfigError for processes that would know neither this object's callbacks nor its
        functions."""
        place, command = self.recipe.place, f"ludic {self.kind.command}"
        if needs_launcher(place) and read_rank_environment() is None:
            setting = f"place.trainers ({place.trainers})" if place.on == "local" else f"place.on ({place.on})"
            raise ConfigError(
                f"{setting} has a launcher start the trainers, and {type(self).__name__} trains in this process; run `{command}`, with "
                "reward=module:function, tools=[module:function] and callbacks.own=module:name for your own parts"
            )
        own = [f"{kind} {name!r}" for kind, objects in self._own.items() for name in objects]
        if own and isinstance(self.recipe, Recipe) and uses_queue(self.recipe):
            raise ConfigError(f"the actors cannot import the {own[0]} of this process; move it to a module")

    def _reset_callbacks(self) -> None:
        """Give the callbacks the state in which the first `train` found them. One that a checkpoint
        has gets that state later."""
        if self._states is None:
            self._states = [_read_state(callback) for callback in self.callbacks]
            return
        for callback, state in zip(self.callbacks, self._states, strict=True):
            if state is None:
                continue
            try:
                callback.load_state_dict(deepcopy(state))
            except Exception:
                logger.exception("the callback %s cannot read its first state, and keeps its present one", callback.name)

    def _find_resumed(self, resume: bool | str | Path) -> Path | None:
        if resume is False:
            return None
        if resume is not True:
            return Path(resume).expanduser()
        if self.recipe.name is None:
            raise ConfigError("resume=True goes on with the run of a name; set name=, or give resume= the folder of the run")
        place = run_path(self.recipe.output, self.recipe.name, "run")
        return place if (place / "progress.json").is_file() else None

    def _require_run(self) -> TrainingRun[Any, Any, Any]:
        if self.run is None:
            raise ConfigError("the run has not begun; call train() first")
        return self.run


def _read_state(callback: Callback) -> dict[str, Any] | None:
    """A copy of its state; None, with the error logged, if it cannot say it."""
    try:
        return deepcopy(callback.state_dict())
    except Exception:
        logger.exception("the callback %s cannot say its state, and keeps it in the next run", callback.name)
        return None


def settings_of(model: object, settings: Mapping[str, Any], **given: Any) -> list[Override]:
    """The overrides of an object: its `model`, what else was `given`, then `settings`. Raises
    ConfigTypeError for a model that is not on disk, ConfigError for a setting that an argument has
    already."""
    if model is not None and not isinstance(model, str | Path):
        raise ConfigTypeError(f"model ({type(model).__name__}) must be a folder or a hub id; use model.save_pretrained(folder)")
    algorithm = settings.get("algorithm", "")
    if not isinstance(algorithm, str):
        raise ConfigTypeError(f"algorithm ({type(algorithm).__name__}) must be a name, such as grpo, or module:function")
    named = {"model": None if model is None else str(model), **given}
    for key in settings:
        if key in named:
            raise ConfigError(f"{key} is an argument of its own; leave it out of the settings")
    return overrides_of({**{key: value for key, value in named.items() if value is not None}, **settings})
