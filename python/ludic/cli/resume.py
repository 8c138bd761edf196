"""Checks of `--resume`: a run resumes with the settings that it began with; `steps` may be raised
where the first steps stay the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ludic.errors import ConfigError
from ludic.files.atomic import write_text
from ludic.recipes.compose import RENAMED, parse_override, to_plain_values, to_yaml
from ludic.recipes.devices import AUTO, SETTINGS
from ludic.runs.directory import DONE, Progress, RunDirectory

_FREE = (
    *("name", "output", "log_every", "report_to", "rollout.log_every", "checkpoint."),
    *("inference.url", "inference.python", "inference.device", "inference.server_args", "inference.weights"),
    *("inference.trainer_address", "inference.timeout_s", "inference.preflight", "ranks."),
    *("sharding.kind", "sharding.shards", "sharding.cpu_offload", "sharding.activation_checkpointing"),
    *("place.", "queue.url", "queue.lease_s", "queue.patience_s"),
)
"""Settings, or prefixes of settings, that may differ on resume: they change where a run executes
and writes, not its result."""


def parse_resume_steps(arguments: Sequence[str], command: str) -> int | None:
    """The N of `steps=N`, the only setting that `--resume` accepts; None without it."""
    if not arguments:
        return None
    overrides = [parse_override(argument) for argument in arguments if "=" in argument]
    if (
        len(overrides) != len(arguments)
        or [override.key for override in overrides] != ["steps"]
        or type(overrides[0].value) is not int
    ):
        raise ConfigError(
            f"--resume uses the settings that the run began with and accepts only steps=N, for more steps, not "
            f"{' '.join(arguments)}; start a new run with `ludic {command}` to change others"
        )
    return int(overrides[0].value)


def resume_recipe(recipe: Any, directory: RunDirectory, steps: int | None) -> Any:
    """`recipe`, which was read from the run's config.yaml, with `steps` steps if that is not None.

    Raises ConfigError, which names the setting, if the recipe differs from the one that the run
    began with.
    """
    progress = directory.read_progress()
    original = None if progress.recipe is None else dict(progress.recipe)
    if steps is not None:
        _check_more(recipe, progress, directory, steps)
        recipe.steps = steps
        original = None if original is None else {**original, "steps": steps}
    if original is not None:
        _check_same(original, recipe, directory)
    if steps is not None:
        _extend(recipe, progress, directory)
    return recipe


def _check_same(original: Mapping[str, Any], recipe: Any, directory: RunDirectory) -> None:
    before = {RENAMED.get(key, key): value for key, value in _flatten(original).items()}
    before = {key: value for key, value in before.items() if key not in SETTINGS or value != AUTO}
    now = _flatten(to_plain_values(recipe))
    for key in sorted(before.keys() & now.keys()):
        if before[key] != now[key] and not key.startswith(_FREE):
            more = f", or raise it with --resume {directory.path} steps=N" if key == "steps" else ""
            raise ConfigError(
                f"{directory.config}: {key} is {now[key]}, but the run began with {before[key]}; restore it{more}, or start a new run "
                f"with `ludic {directory.command} {directory.config} name=NAME`"
            )
    _check_same_samplers(before, now, directory)


def _check_same_samplers(before: Mapping[str, Any], now: Mapping[str, Any], directory: RunDirectory) -> None:
    """Raise ConfigError if actors sample now and the trainer's process did before, or the other way
    round: a checkpoint has the position of the one or of the other. The number of actors may
    change."""
    had, has = (bool(values.get("place.actors") or values.get("queue.url")) for values in (before, now))
    if had != has:
        key = "place.actors" if now.get("place.actors") != before.get("place.actors") else "queue.url"
        raise ConfigError(
            f"{directory.config}: {key} is {now.get(key)}, but the run began with {before.get(key)}, and its checkpoints have no position "
            f"for {'actors' if has else 'a run without actors'}; restore it, or start a new run with "
            f"`ludic {directory.command} {directory.config} name=NAME`"
        )


def _check_more(recipe: Any, progress: Progress, directory: RunDirectory, steps: int) -> None:
    if steps < progress.steps or (progress.phase == DONE and steps == progress.steps):
        raise ConfigError(f"steps ({steps}) must be more than the {progress.steps} that {directory.path} has taken")
    trainer = recipe.trainer
    kind, ratio = trainer.lr_scheduler_type, trainer.warmup_ratio if not trainer.warmup_steps else None
    if kind in ("cosine", "linear") or (kind is not None and ratio):
        raise ConfigError(
            f"trainer.lr_scheduler_type ({kind}) depends on the number of steps, so with steps={steps} the steps taken so far would have "
            f"had other learning rates; start a new run with model={directory.model}. A run with "
            "trainer.lr_scheduler_type=constant_with_warmup can take more steps"
        )


def _extend(recipe: Any, progress: Progress, directory: RunDirectory) -> None:
    """Save the new number of steps; a finished run returns to its last phase."""
    if progress.phase == DONE:
        progress.phase, progress.after = directory.last_phase, None
    progress.recipe = None if progress.recipe is None else to_plain_values(recipe)
    directory.write_progress(progress)
    write_text(directory.config, to_yaml(recipe))


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
