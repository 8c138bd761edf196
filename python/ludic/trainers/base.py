"""A recipe as a Python object: composed when it is made, run by `train`."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.cli.training_command import TrainingCommand, run_command
from ludic.errors import ConfigError, ConfigTypeError
from ludic.event_loop import call_outside_loop
from ludic.recipes.compose import Override
from ludic.runs.directory import run_path
from ludic.trainers.inputs import overrides_of

if TYPE_CHECKING:
    from rich.console import Console

    from ludic.runs.base import TrainingRun
    from ludic.runs.directory import RunDirectory
    from ludic.runs.screen import Screen
    from ludic.runs.stop_request import StopRequest
    from ludic.training.callbacks import Callback
    from ludic.training.trainer import Trainer


class RecipeTrainer:
    """Runs a recipe as its command does: the same settings and checks, the same folder, the same
    resume.

    `recipe` has every setting. From the beginning of `train` on, `run` has the phases, with
    `run.parts` (data, algorithm, model, tokenizer), and `trainer` is the `Trainer` of the present
    phase.
    """

    def __init__(self, command: TrainingCommand[Any, Any], overrides: Sequence[Override], callbacks: Sequence[Callback]) -> None:
        """Raises ConfigError for settings that cannot be."""
        self.callbacks = tuple(callbacks)
        """Called besides those that the settings name."""
        self.recipe: Any = command.compose(overrides)  # type: ignore[arg-type]
        self.run: TrainingRun[Any, Any, Any] | None = None
        """The run; None before `train`."""
        self._command = _PreparedCommand(command, self)

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

    def train(self, *, resume: bool | str | Path = False) -> dict[str, Any]:
        """Run to the end, and return the content of summary.json. After Ctrl-C it has `status`
        interrupted.

        `resume`: True to go on with the run of this name (`name=`), if there is one; a path to go
        on with the run in that folder. Settings that differ from those that it began with are
        errors, but for more `steps` and for those that change no result. In a notebook this blocks
        too; the run is then in another thread.
        """
        place = self._find_resumed(resume)
        arguments = [] if place is None else self._more_steps(place)
        call_outside_loop(
            lambda: run_command(self._command, arguments, resume=place, json_only=False, print_config=False),
            on_interrupt=self.stop,
        )
        if self.run is None:
            return {}
        summary = self.run.directory.summary
        return json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {}

    def stop(self) -> None:
        """Have `train`, which is running in another thread, end after this step, as Ctrl-C does."""
        if self.run is not None and not self.run.stop:
            self.run.stop.signum = signal.SIGINT

    def _find_resumed(self, resume: bool | str | Path) -> Path | None:
        if resume is False:
            return None
        if resume is not True:
            return Path(resume).expanduser()
        if self.recipe.name is None:
            raise ConfigError("resume=True goes on with the run of a name; set name=, or give resume= the folder of the run")
        place = run_path(self.recipe.output, self.recipe.name, "run")
        return place if (place / "progress.json").is_file() else None

    def _more_steps(self, place: Path) -> list[str]:
        """The argument that raises the steps of the run in `place`, if it began with fewer."""
        began = self._command.directory.open_to_read(place).read_progress().recipe or {}
        steps = self.recipe.steps
        return [] if steps is None or steps == began.get("steps", steps) else [f"steps={steps}"]

    def _require_run(self) -> TrainingRun[Any, Any, Any]:
        if self.run is None:
            raise ConfigError("the run has not begun; call train() first")
        return self.run


class _PreparedCommand:
    """The command of a `RecipeTrainer`, whose settings are composed already."""

    is_placed = False

    def __init__(self, inner: TrainingCommand[Any, Any], owner: RecipeTrainer) -> None:
        self._inner, self._owner = inner, owner

    @property
    def directory(self) -> type[RunDirectory]:
        folder: type[RunDirectory] = self._inner.directory
        return folder

    def compose(self, arguments: Sequence[str]) -> Any:
        """The recipe of the object, whatever the arguments: of a run that is resumed, they name its
        settings, with which this one is compared then."""
        return deepcopy(self._owner.recipe)

    def build(self, recipe: Any, screen: Screen) -> Any:
        return self._inner.build(recipe, screen)

    def folder_name(self, recipe: Any) -> str:
        return self._inner.folder_name(recipe)

    def run(self, recipe: Any, parts: Any, directory: Any, screen: Screen, stop: StopRequest) -> TrainingRun[Any, Any, Any]:
        run: TrainingRun[Any, Any, Any] = self._inner.run(recipe, parts, directory, screen, stop)
        run.callbacks = self._owner.callbacks
        self._owner.run = run
        return run

    def conclude(self, run: Any, console: Console) -> str:
        return self._inner.conclude(run, console)


def settings_of(model: object, settings: Mapping[str, Any], **given: Any) -> list[Override]:
    """The overrides of an object: its `model`, what else was `given`, then `settings`. Raises
    ConfigTypeError for a model that is not on disk, ConfigError for a setting that an argument has
    already."""
    if model is not None and not isinstance(model, str | Path):
        raise ConfigTypeError(
            f"model ({type(model).__name__}) must be a folder or a hub id, which a resumed run loads again; save it with "
            "model.save_pretrained(folder) and its tokenizer beside it"
        )
    named = {"model": None if model is None else str(model), **given}
    for key in settings:
        if key in named:
            raise ConfigError(f"{key} is an argument of its own; leave it out of the settings")
    return overrides_of({**{key: value for key, value in named.items() if value is not None}, **settings})
