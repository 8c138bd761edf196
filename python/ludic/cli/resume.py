"""What `--resume` goes on with: the settings that the run was begun with, and for more steps
where that means the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.errors import ConfigError
from ludic.files.atomic import write_text
from ludic.recipes.compose import RENAMED, parse_override, plain_values, to_yaml
from ludic.runs.directory import DONE, Progress, RunDirectory

_FREE = (
    *("name", "output", "log_every", "report_to", "rollout.log_every", "checkpoint."),
    *("inference.url", "inference.python", "inference.device", "inference.server_args", "inference.weights"),
    *("inference.trainer_address", "inference.timeout_s", "inference.preflight"),
)
"""Settings, or beginnings of them, that change where a run is played and written, and not the
run."""


def wanted_steps(arguments: Sequence[str], command: str) -> int | None:
    """The N of `steps=N`, which is all that a run that is gone on with can be given."""
    if not arguments:
        return None
    given = [parse_override(argument) for argument in arguments if "=" in argument]
    if len(given) != len(arguments) or [override.key for override in given] != ["steps"] or type(given[0].value) is not int:
        raise ConfigError(
            f"--resume goes on with the settings that the run was begun with and takes no other setting ({' '.join(arguments)}) but "
            f"steps=N, for more steps; begin a new run with `ludic {command}` for others"
        )
    return int(given[0].value)


def resume_recipe(recipe: Any, directory: RunDirectory, steps: int | None) -> Any:
    """`recipe`, read from the run's config.yaml, if it is what the run was begun with; with as many
    steps as are asked for.

    Raises ConfigError, which names the setting, where it would be another run.
    """
    progress = directory.read_progress()
    begun = None if progress.recipe is None else dict(progress.recipe)
    if steps is not None:
        _check_more(recipe, progress, directory, steps)
        recipe.steps = steps
        begun = None if begun is None else {**begun, "steps": steps}
    if begun is not None:
        _check_same(begun, recipe, directory)
    if steps is not None:
        _extend(recipe, progress, directory)
    return recipe


def _check_same(begun: Mapping[str, Any], recipe: Any, directory: RunDirectory) -> None:
    before = {RENAMED.get(key, key): value for key, value in _flat(begun).items()}
    now = _flat(plain_values(recipe))
    for key in sorted(before.keys() & now.keys()):
        if before[key] != now[key] and not key.startswith(_FREE):
            more = f", or ask for more with --resume {directory.path} steps=N" if key == "steps" else ""
            raise ConfigError(
                f"{directory.config}: {key} is {now[key]}, and the run was begun with {before[key]}; put it back{more}, or begin a new run "
                f"with `ludic {directory.command} {directory.config} name=NAME`"
            )


def _check_more(recipe: Any, progress: Progress, directory: RunDirectory, steps: int) -> None:
    if steps < progress.steps or (progress.phase == DONE and steps == progress.steps):
        raise ConfigError(f"steps ({steps}) must be more than the {progress.steps} that {directory.path} has done")
    trainer = recipe.trainer
    kind, ratio = trainer.lr_scheduler_type, trainer.warmup_ratio if not trainer.warmup_steps else None
    if kind in ("cosine", "linear") or (kind is not None and ratio):
        raise ConfigError(
            f"trainer.lr_scheduler_type ({kind}) spreads the learning rate over all steps of the run, so that with steps={steps} its first "
            f"ones would have been others; begin a new run with model={directory.model}. A run that is begun with "
            "trainer.lr_scheduler_type=constant_with_warmup can take more steps"
        )


def _extend(recipe: Any, progress: Progress, directory: RunDirectory) -> None:
    """A run at its end goes back into its last phase."""
    if progress.phase == DONE:
        progress.phase, progress.after = directory.last_phase, None
    progress.recipe = None if progress.recipe is None else plain_values(recipe)
    directory.write_progress(progress)
    write_text(directory.config, to_yaml(recipe))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
